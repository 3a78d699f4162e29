"""Commands of `lapa2` that are printed as the next step, so that a reader can copy them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def command(*words: object, **options: Any) -> str:
    """A command line, quoted for a shell: `lapa2 runs 'my run' --state failed`.

    Every command that is printed and holds a value is made here.

    Args:
        words: The command's name and its arguments.
        options: By the names of parameters (out, model_class). None, False and nothing are left
            out, True is a flag, several values repeat the option, and a mapping is NAME=VALUE of
            each.
    """
    return shlex.join(["lapa2", *map(str, words), *_options(options)])


def command_options(**values: Any) -> str:
    """Options of `command` by themselves, quoted: `--only 'arm=my arm'`."""
    return shlex.join(_options(values))


def _options(values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False or value == ():
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
            continue
        if isinstance(value, Mapping):
            value = [f"{key}={_plain(part)}" for key, part in value.items()]
        for part in value if isinstance(value, list | tuple) else [value]:
            text = _plain(part)
            # After "=", a value that begins with a hyphen is no option.
            words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return words


def _plain(value: object) -> str:
    """A value as options and TOML write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
