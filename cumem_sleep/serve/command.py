"""The words of a server's command: what its options say, and where it listens.

A server may listen where only this machine reaches it: the paths of vLLM's development mode need no key.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from itertools import zip_longest

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
