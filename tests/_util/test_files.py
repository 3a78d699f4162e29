"""Files and folders: what is removed, what is refused, and what an error says about a file."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.files import (
    LOCK,
    TEMPORARY_PREFIX,
    check_name,
    holds_only,
    is_damage,
    read_checkpoint,
    remove_abandoned,
    result_folder,
    temporary_folder,
    try_lock,
    without_checksums,
    write_checkpoint,
)

OURS = holds_only("table.csv", "*.png")


def aged(path):
    """As if nothing had been done there for two minutes."""
    before = time.time() - 120
    os.utime(path, (before, before))


@pytest.mark.parametrize("names", [(), (f"{LOCK}.new",)])
def test_what_a_process_left_that_died_without_a_lock_goes_in_a_minute(tmp_path, names):
    """It died before it held its lock, or when it had removed all else."""
    left = tmp_path / f"{TEMPORARY_PREFIX}x"
    left.mkdir()
    for name in names:
        (left / name).touch()
    remove_abandoned(tmp_path)
    assert left.exists(), "its owner may be about to lock it"
    aged(left)
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_what_is_filled_on_a_disk_without_locks_stays(tmp_path):
    left = tmp_path / f"{TEMPORARY_PREFIX}x"
    (left / "new").mkdir(parents=True)
    (left / f"{LOCK}.new").touch()
    aged(left)
    remove_abandoned(tmp_path)
    assert left.exists()


def test_a_kill_at_any_moment_of_a_removal_leaves_what_the_next_process_removes(
    tmp_path, monkeypatch
):
    """The lock is the last file to go: until then the folder is known as abandoned."""
    removed, real = [], os.unlink

    def unlink(path, **given):
        removed.append(Path(path).name)
        real(path, **given)

    monkeypatch.setattr(os, "unlink", unlink)
    with temporary_folder(tmp_path) as beside:
        for name in ("z", "a", "new/of"):
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).touch()
    assert len(removed) == 4
    assert removed[-1] == LOCK


def test_a_pair_of_folders_that_a_kill_or_somebody_left_is_named_and_not_moved(tmp_path, capsys):
    """A process was killed between two renames; or somebody planted such a pair."""
    left = tmp_path / f"{TEMPORARY_PREFIX}x"
    for name in ("before", "new/out"):
        (left / name).mkdir(parents=True)
        (left / name / "table.csv").write_text(name)
    (left / LOCK).touch()
    with result_folder(tmp_path / "other", False, OURS) as folder:
        (folder / "table.csv").write_text("mine")
    assert sorted(each.name for each in tmp_path.iterdir()) == [left.name, "other"]
    assert (left / "new" / "out" / "table.csv").read_text() == "new/out"
    assert f"{left} holds a folder that a killed command had finished" in capsys.readouterr().err


def test_force_replaces_nothing_that_a_command_did_not_write(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("table.csv", "a.png", "thesis.tex"):
        (out / name).touch()
    with (
        pytest.raises(RunError, match="holds thesis.tex, which is not of this command's making"),
        result_folder(out, True, OURS),
    ):
        pass
    (out / "thesis.tex").rename(tmp_path / "thesis.tex")
    with result_folder(out, True, OURS) as folder:
        (folder / "table.csv").write_text("new")
    assert [each.name for each in out.iterdir()] == ["table.csv"]


def test_places_that_no_folder_can_be_moved_to_are_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(RunError, match="loop of links"), result_folder(tmp_path / "a"):
        pytest.fail("it began")
    with pytest.raises(RunError, match="not UTF-8"), result_folder(tmp_path / "b\udce9"):
        pytest.fail("it began")
    monkeypatch.setattr(os.path, "ismount", lambda place: place == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with (
        pytest.raises(RunError, match="where a disk is mounted.*such as .*disk/run"),
        result_folder(tmp_path / "disk"),
    ):
        pytest.fail("it began")
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
    from lapa2_interp._util import files

    def closed(file):
        raise PermissionError(13, "Permission denied")

    write_checkpoint(tmp_path / "state.pt", {"step": 3})
    monkeypatch.setattr(files, "ZipFile", closed)
    with pytest.raises(PermissionError):
        read_checkpoint(tmp_path / "state.pt", "cpu")


def test_json_that_is_nested_too_deeply_is_damage():
    with pytest.raises(ValueError, match="nested too deeply"):
        without_checksums("[" * 200_000)


def test_a_file_is_held_by_one_and_by_all_where_there_are_no_locks(tmp_path, monkeypatch):
    with (tmp_path / "a").open("w") as one, (tmp_path / "a").open("w") as other:
        assert try_lock(one)
        assert not try_lock(other)
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "none")))
        assert try_lock(other)
