"""What the command of a server says of it: whether it is vLLM, and where it listens.

A server may listen where only this machine reaches it: the paths of vLLM's development mode need no key.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

LOOPBACK = "127.0.0.1"
GATE = "cumem_sleep.vllm.SleepGate"
_SHELLS = ("sh", "bash", "dash", "zsh")
_ASSIGNMENT = re.compile(r"\w+=")
_BEGIN_ANOTHER = ("env", "nice", "nohup", "setsid", "exec")
_LEAVE_OPEN = "is for this front to choose: leave it out, or leave it open with {port} or {socket}"


def is_vllm(command: Sequence[str]) -> bool:
    """Whether words are `vllm serve …`, or one of its modules, however it is reached."""
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        program = word.removeprefix("-m").rpartition("/")[2]  # `python -mMODULE` is allowed, too
        if program in ("vllm", "vllm.entrypoints.cli.main") and following == "serve":
            return True
        if program == "vllm.entrypoints.openai.api_server" or word.endswith("vllm/entrypoints/openai/api_server.py"):
            return True
    return False


def has_gate(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a server has the gate of this package: its command says so, or this package is installed where its vLLM
    is, which gets it then. The Rust frontend of vLLM 0.33 takes no middleware, and does not start with one.

    Args:
        variables: of its environment.
    """
    if any(GATE in word for word in command):
        return True
    if variables.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        return False
    is_installed = command[0].rpartition("/")[2].startswith(("vllm", "python")) and is_vllm(command)
    program = shutil.which(command[0], path=variables.get("PATH", os.defpath)) if is_installed else None
    if program is None:
        return False
    # A script may be a link from elsewhere, as `uv tool` makes it; a Python that is one belongs where the link is.
    where = Path(program).resolve() if Path(program).name.startswith("vllm") else Path(program).absolute()
    return any(where.parent.parent.glob("lib/python3*/*-packages/cumem_sleep-*.dist-info"))


def uses_socket(command: Sequence[str]) -> bool:
    """Whether a server listens on a Unix socket: if its command says so, and vLLM unless its command says otherwise."""
    if any("{port}" in word for word in command):
        return False
    return any("{socket}" in word for word in command) or is_vllm(command)


def values(command: Sequence[str], option: str) -> list[str]:
    """What an option is given, each time that it is; "" without a value."""
    found = []
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        # vLLM takes options that are cut short, as argparse does; `--h` is --help to it, too.
        if len(name) > 3 and option.startswith(name):
            found.append(value if equals else following)
    return found


def listening_host(command: Sequence[str]) -> str:
    """Where a server with a port listens."""
    return ([LOOPBACK] + [host for host in values(_words(command), "--host") if is_loopback(host)])[-1]


def wrong_places(command: Sequence[str]) -> Iterator[str]:
    """What is wrong with where a server would listen."""
    words = _words(command)
    for host in values(words, "--host"):
        if not is_loopback(host):
            where = host or repr(host)
            yield f"--host {where} would open the server to the network: leave it out, or listen at {LOOPBACK}"
    if not is_vllm(words):
        if not any("{port}" in word or "{socket}" in word for word in words):
            yield "is not vllm serve, and does not say where it listens: put {port} or {socket} where it belongs"
        return
    for option, open_value in (("--port", "{port}"), ("--uds", "{socket}")):
        if any(value != open_value for value in values(words, option)):
            yield f"{option} {_LEAVE_OPEN}"
    if not is_vllm(command) and not _is_complete(words):
        yield (
            "runs vllm serve through a shell, where no argument is added: "
            f"write --uds {{socket}}, or --host {LOOPBACK} --port {{port}}, there"
        )


def missing_program(command: Sequence[str], path: str) -> str | None:
    """The program that a command begins with, if it is not there; None if it is, or only its start will tell.

    Args:
        path: where programs are looked for, as in `PATH`.
    """
    words = list(command)
    while words and (words[0] in _BEGIN_ANOTHER or _ASSIGNMENT.match(words[0])):
        first = words.pop(0)
        if first.startswith("PATH="):
            return None
        if first in _BEGIN_ANOTHER and first != "exec" and shutil.which(first, path=path) is None:
            return first
    if not words or words[0].startswith("-"):
        return None
    if shutil.which(words[0], path=path) is None:
        return words[0]
    is_shell = words[0].rpartition("/")[2] in _SHELLS and words[1:2] == ["-c"] and len(words) > 2
    inner = _shell_words(words[2]) if is_shell else []
    begin = [word for word in inner if word != "exec" and not _ASSIGNMENT.match(word)]
    return missing_program(inner, path) if is_vllm(begin[:2]) else None


def _is_complete(words: Sequence[str]) -> bool:
    """Whether vLLM listens where it should with these words alone."""
    return bool(values(words, "--uds") or (values(words, "--host") and values(words, "--port")))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _words(command: Sequence[str]) -> list[str]:
    """The words of a command; where it is not vLLM itself, those of texts in it for a shell, too."""
    if is_vllm(command):
        return list(command)
    return [inner for word in command for inner in (_shell_words(word) if " " in word or "\n" in word else [word])]


def _shell_words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)  # `cd x;vllm serve` has four words
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return text.split()
