"""Files and folders: what is removed, what is refused, and what an error says about a file."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import Timeout

from lapa2_interp._util.parsing import parse_object
from lapa2_interp.files import (
    DAY,
    HOST,
    TEMPORARY_PREFIX,
    acquire_lock,
    atomic_folder,
    check_name,
    holds_only,
    is_damage,
    read_checkpoint,
    remove_abandoned,
    result_folder,
    temporary_folder,
    write_checkpoint,
    write_json,
    write_text,
)

OURS = holds_only("table.csv", "*.png")


KILLED = """
import os, signal, sys
from pathlib import Path
from lapa2_interp.files import temporary_folder
with temporary_folder(Path(sys.argv[1])) as place:
    (place / "half").write_text("made")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_lives_stays(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.glob(f"{TEMPORARY_PREFIX}{HOST}-*")
    assert (left / "half").is_file()
    with temporary_folder(tmp_path) as mine, temporary_folder(tmp_path) as another:
        assert sorted(tmp_path.iterdir()) == sorted([mine, another])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "age", "stays"),
    [
        (f"{HOST}-{os.getppid()}-abcdefgh", 2 * DAY, True),
        (f"{HOST}-999999999-abcdefgh", 0, False),
        ("elsewhere-999999999-abcdefgh", DAY - 60, True),
        ("elsewhere-999999999-abcdefgh", DAY + 60, False),
        (f"{HOST}-my-notes", 2 * DAY, True),
    ],
)
def test_a_temporary_folder_stays_while_its_process_may_live(tmp_path, name, age, stays):
    left = tmp_path / f"{TEMPORARY_PREFIX}{name}"
    (left / "new").mkdir(parents=True)
    os.utime(left, (time.time() - age,) * 2)
    remove_abandoned(tmp_path)
    assert left.exists() == stays


def test_all_of_a_file_or_folder_is_on_the_disk_before_it_is_seen(tmp_path, monkeypatch):
    log, real_fsync, real_rename = [], os.fsync, os.rename

    def fsync(handle):
        log.append(Path(f"/proc/self/fd/{handle}").readlink())
        real_fsync(handle)

    def rename(source, target, **settings):
        log.append((Path(source), Path(target)))
        real_rename(source, target, **settings)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    parent = tmp_path / "deep" / "er"
    with atomic_folder(parent / "place") as fresh:
        (fresh / "a").write_text("a")
        (fresh / "b").write_text("b")
        assert not (parent / "place").exists()
    assert log[:2] == [tmp_path, tmp_path / "deep"], "new folders are in their parents"
    assert set(log[2:4]) == {fresh / "a", fresh / "b"}
    assert log[4:] == [fresh, (fresh, parent / "place"), parent]
    log.clear()
    write_text(parent / "new" / "file", "text")
    above, made, (source, target), after = log
    assert (above, made, target, after) == (
        parent,
        source,
        parent / "new" / "file",
        parent / "new",
    )
    assert [entry.name for entry in (parent / "new").iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "file", "new")
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "folder"):
        pass
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]


def test_a_stop_between_two_renames_keeps_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    write_text(tmp_path / "run" / "file", "old")
    rename = os.rename

    def stopped(source, target, **settings):
        rename(source, target, **settings)
        if Path(target).name == "before":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_force_replaces_what_a_command_wrote(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("table.csv", "a.png"):
        (out / name).touch()
    with result_folder(out, True, OURS) as folder:
        (folder / "table.csv").write_text("new")
    assert [entry.name for entry in out.iterdir()] == ["table.csv"]


def test_a_result_may_be_a_folder_on_a_disk_with_a_name_in_any_script(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with result_folder(tmp_path / "disk" / "run"):
        pass
    check_name(tmp_path / "\u202eé")


def test_what_says_nothing_about_a_file_is_no_damage():
    for error in (
        MemoryError("Unable to allocate 9 GiB"),
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        UnicodeEncodeError("utf-8", "\udce9", 0, 1, "surrogates not allowed"),
    ):
        assert not is_damage(error), error
    for error in (FileNotFoundError(2, "No such file"), OSError("truncated"), ValueError("bits")):
        assert is_damage(error), error


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    from lapa2_interp import files

    def closed(file):
        raise PermissionError(13, "Permission denied")

    write_checkpoint(tmp_path / "state.pt", {"step": 3})
    monkeypatch.setattr(files, "ZipFile", closed)
    with pytest.raises(PermissionError):
        read_checkpoint(tmp_path / "state.pt", "cpu")


def test_a_json_file_holds_the_fields(tmp_path):
    for fields in ({"name": "\u00e9", "of": [1, None]}, '{"name": "\u00e9", "of": [1, null]}'):
        write_json(tmp_path / "file.json", fields)
        text = (tmp_path / "file.json").read_text("utf-8")
        assert text == '{\n "name": "\u00e9",\n "of": [\n  1,\n  null\n ]\n}\n'
        assert parse_object(text) == json.loads(text)


def test_a_lock_is_held_by_one_and_by_all_where_there_are_no_locks(tmp_path, monkeypatch):
    file = tmp_path / "lock"
    with acquire_lock(file), pytest.raises(Timeout), acquire_lock(file):
        pytest.fail("it was held twice")
    with acquire_lock(file):
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "none")))
        with acquire_lock(file):
            pass
        monkeypatch.undo()
    with pytest.raises(OSError, match="of the block"), acquire_lock(file):
        raise OSError(errno.ENOLCK, "of the block")


def test_a_link_at_a_lock_is_not_followed(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(OSError, match="symbolic links"), acquire_lock(tmp_path / "lock"):
        pytest.fail("it was locked")
    assert (tmp_path / "thesis").read_text() == "mine"
