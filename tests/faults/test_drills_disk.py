"""Drills of disks that are full or read-only. `make drills`."""

import shlex
import shutil
import subprocess

import pytest
from drills import LINES, contents, different, done, furnish, left_over

from lapa2_interp.cli.app import main

pytestmark = pytest.mark.drill
WRITING = (
    "generate", "score", "propositions", "select", "fading", "prefix train", "view", "report",
)  # fmt: skip
LITTLE = (0, 24, 160)
"""KiB that are free; a command that needs less than one of them ends well."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("home"))


@pytest.fixture
def disk(tmp_path):
    """A disk of a megabyte, and how to change it: `mount -o remount,...`."""
    disk_folder = tmp_path / "disk"
    disk_folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk_folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk_folder)], check=True)

    yield disk_folder, remount
    subprocess.run(["umount", "-l", str(disk_folder)], check=True)


def refusal(line, capsys):
    """The only line of ours when a command ends with code 2; "" when it ends well."""
    capsys.readouterr()
    code = main(shlex.split(line))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lapa2: ")]
    assert (code, len(said)) in ((0, 0), (2, 1)), said
    return said[0] if said else ""


@pytest.mark.parametrize("command", WRITING)
def test_a_full_disk(command, home, disk, tmp_path, capsys, record_property):
    record_property("promise", "2")
    folder, remount = disk
    line, refused = LINES[command].format(home=home, out=folder / "out"), []
    for free in LITTLE:
        block = folder / "something else"
        block.write_bytes(bytes((1 << 20) - (free << 10) - 4096))
        said = refusal(line, capsys)
        block.unlink()
        if not said:
            break
        assert "full" in said or "No space left" in said
        assert not left_over(folder)
        refused.append(free)
    assert refused, "there was room"
    remount("size=50m")
    if said:
        assert refusal(line, capsys) == ""
    (tmp_path / "whole").mkdir()
    done(LINES[command].format(home=home, out=tmp_path / "whole" / "out"), tmp_path / "log")
    assert different(results(folder), results(tmp_path / "whole")) == []
    free = ", ".join(map(str, refused))
    record_property("result", f"a line with {free} KiB free; with room again, the same bytes")


def results(folder):
    """Results of a command, without its cache of scores."""
    return {
        name: data for name, data in contents(folder).items() if not name.startswith("out-cache")
    }


@pytest.mark.parametrize("command", WRITING)
def test_a_read_only_disk(command, home, disk, capsys, record_property):
    record_property("promise", "4")
    folder, remount = disk
    remount("ro")
    said = refusal(LINES[command].format(home=home, out=folder / "out"), capsys)
    assert "Read-only file system" in said
    assert str(folder) in said
    record_property("result", "refused in a line")
