"""What will not work on this machine, or not well, although models.yaml says nothing wrong."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence

from . import hardware
from .command import is_loopback, shell_words
from .config import Config, ModelConfig
from .engines import ENGINES

_SHELLS = ("sh", "bash", "dash", "zsh")
_ASSIGNMENT = re.compile(r"\w+=")
_BEGIN_ANOTHER = ("env", "nice", "nohup", "setsid", "exec")


def problems(config: Config) -> Iterator[str]:
    """Each with the key that it is about. Asks `nvidia-smi`, which takes tenths of a second."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = {gpu.number for gpu in hardware.gpus(visible)}
    if not found and visible:  # nobody can say what these are
        found = set(range(len([each for each in visible.split(",") if each])))
    for name, model in config.models.items():
        yield from (f"models.{name}.{problem}" for problem in _of_model(model, found))
    front = config.front
    if not front.api_keys and not is_loopback(front.host):
        yield f"front.host: {front.host} is open to other machines, and there are no keys: set api_keys"


def _of_model(model: ModelConfig, gpus: set[int]) -> Iterator[str]:
    if gpus or "gpus" in model.model_fields_set:
        for gpu in model.gpus:
            if gpu not in gpus:
                there = f"there are {', '.join(map(str, sorted(gpus)))}" if gpus else "this machine shows none"
                yield f"gpus: there is no GPU {gpu}: {there}"
    if model.command is None:
        return
    path = model.env.get("PATH", os.environ.get("PATH", os.defpath))
    if (program := missing_program(model.command, path)) is not None:
        yield f"command: there is no program {program!r} here: install it, or write its path"


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
    inner = shell_words(words[2]) if is_shell else []
    begin = [word for word in inner if word != "exec" and not _ASSIGNMENT.match(word)]
    is_known = any(engine.is_started_by(begin[:2]) for engine in ENGINES.values())
    return missing_program(inner, path) if is_known else None
