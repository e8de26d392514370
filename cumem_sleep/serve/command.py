"""The words of a server's command: what its options say, and where it listens.

A server may listen where only this machine reaches it: the paths of vLLM's development mode need no key.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

LOOPBACK = "127.0.0.1"


def values(command: Sequence[str], option: str) -> list[str]:
    """What an option is given, each time that it is; "" without a value."""
    found = []
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        # vLLM takes options that are cut short, as argparse does; `--h` is --help to it, too.
        if len(name) > 3 and option.startswith(name):
            found.append(value if equals else following)
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def inner_words(command: Sequence[str]) -> list[str]:
    """The words of a command, and those of texts in it for a shell."""
    return [inner for word in command for inner in (shell_words(word) if " " in word or "\n" in word else [word])]


def shell_words(text: str) -> list[str]:
    """The words of a text for a shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)  # `cd x;vllm serve` has four words
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return text.split()


def packages_beside(command: Sequence[str], variables: Mapping[str, str], name: str) -> Path | None:
    """The folder of packages where this one is installed beside the program that a command begins with; None if it is
    not, or the program is neither of this name nor Python.

    Args:
        variables: of its environment.
    """
    if not command[0].rpartition("/")[2].startswith((name, "python")):
        return None
    program = shutil.which(command[0], path=variables.get("PATH", os.defpath))
    if program is None:
        return None
    # A script may be a link from elsewhere, as `uv tool` makes it; a Python that is one belongs where the link is.
    where = Path(program).resolve() if Path(program).name.startswith(name) else Path(program).absolute()
    found = where.parent.parent.glob("lib/python3*/*-packages/cumem_sleep-*.dist-info")
    return next((each.parent for each in found), None)
