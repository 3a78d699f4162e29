"""Drills of what is shipped: the sdist, the wheel that is built from it, and the command of the
wheel. `make dist-check`."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.drill
ROOT = Path(__file__).parents[2]
NAME = "lapa2_interp-0.1.0"


def built(folder):
    """An sdist, and the wheel that is built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return built(tmp_path_factory.mktemp("dist"))


def tracked():
    """The files of this version of the repository, new ones too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if (ROOT / line).is_file()}


def test_the_wheel_holds_the_packages_files_and_nothing_else(dist, record_property):
    _, wheel = dist
    found = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    wanted = {name for name in tracked() if name.startswith("lapa2_interp/")}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert found == wanted | {f"{NAME}.dist-info/{name}" for name in about}
    record_property("files", len(found))
    record_property("megabytes", round(wheel.stat().st_size / 1e6, 1))


def test_the_sdist_holds_the_repositorys_files_and_nothing_else(dist, record_property):
    sdist, _ = dist
    with tarfile.open(sdist) as opened:
        found = {each.name.partition("/")[2] for each in opened if each.isfile()}
    assert found == tracked() | {"PKG-INFO"}
    record_property("files", len(found))
    record_property("megabytes", round(sdist.stat().st_size / 1e6, 1))


def test_built_twice_it_is_the_same_bytes(dist, tmp_path):
    for one, other in zip(dist, built(tmp_path), strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("of", ["sdist", "wheel"])
def test_its_command_runs_elsewhere(of, dist, tmp_path, record_property):
    """In an environment with nothing but what is shipped in front of the packages it needs."""
    venv, here = tmp_path / "venv", tmp_path / "here"
    here.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", venv, "install", "--quiet", "--no-deps"]
    install += ["--no-index", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*install, dist[["sdist", "wheel"].index(of)]], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"LAPA2_CACHE": str(tmp_path / "cache")}

    def run(*command):
        done = subprocess.run(
            [venv / "bin" / command[0], *command[1:]],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = run("python", "-c", "import lapa2_interp; print(lapa2_interp.__file__)").strip()
    assert Path(place).is_relative_to(venv)
    began = time.monotonic()
    assert "Usage: lapa2" in run("lapa2", "--help")
    record_property("installed", of)
    record_property("seconds of --help", round(time.monotonic() - began, 1))
    assert "tiny-gpt2" in run("lapa2", "models")
    assert "contrastive" in run("lapa2", "prefixes")  # a file of the package's data
    cell = "--attribute positive --prompt lake --samples 1 --length 20 --device cpu --out text"
    run("lapa2", "generate", "--model", "tiny-gpt2", *cell.split())
    assert list((here / "text" / "cells").iterdir())


def test_every_command_has_an_entry_point(dist):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    text = zipfile.ZipFile(dist[1]).read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert [f"{name} = {target}" for name, target in declared.items()] == text.splitlines()[1:]
