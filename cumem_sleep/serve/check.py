"""What will not work on this machine, or not well, although models.yaml says nothing wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from .. import host_facts
from . import hardware
from .command import is_loopback
from .config import Config, ModelConfig
from .units import HOST_RESERVE_BYTES


def problems(config: Config) -> Iterator[str]:
    """Each with the key that it is about. Asks `nvidia-smi`, which takes tenths of a second."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = {gpu.number for gpu in hardware.gpus(visible)}
    if not found and visible:  # nobody can say what these are
        found = set(range(len([each for each in visible.split(",") if each])))
    for name, model in config.models.items():
        yield from (f"models.{name}.{problem}" for problem in _of_model(model, found))
    if config.vault is not None:
        total = host_facts.mem_total_bytes()
        if total is not None and config.vault.memory > total:
            yield f"vault.memory: this host has {total / (1 << 30):.1f} GiB: give the vault less"
        if config.vault.spill is not None and not os.access(config.vault.spill, os.W_OK | os.X_OK):
            yield f"vault.spill: nothing can be written to {config.vault.spill}: make the folder, for this user alone"
    front = config.front
    if not front.api_keys and not is_loopback(front.host):
        yield f"front.host: {front.host} is open to other machines, and there are no keys: set api_keys"


def kept(config: Config) -> Iterator[str]:
    """How much of their KV cache models may keep asleep, where that is left to be found out."""
    room, whose = config.host_memory, "host_memory"
    if config.vault is not None:
        room, whose = config.vault.memory, "the vault's memory"
    elif room is None and (available := hardware.host_available_bytes()) is not None:
        room, whose = max(0, available - HOST_RESERVE_BYTES), "what the host has free now"
    left = (
        "what backups leave of host memory"
        if room is None
        else f"what backups leave of {room / (1 << 30):.1f} GiB ({whose})"
    )
    for name, model in config.models.items():
        if model.env.get("CUMEM_SLEEP_KEEP_KV_BYTES", os.environ.get("CUMEM_SLEEP_KEEP_KV_BYTES")) == "auto":
            yield f"models.{name} keeps of its KV cache {left}"


def _of_model(model: ModelConfig, gpus: set[int]) -> Iterator[str]:
    if gpus or model.gpus is not ModelConfig.gpus:  # the default, which nobody wrote, may be of no use
        for gpu in model.gpus:
            if gpu not in gpus:
                there = f"there are {', '.join(map(str, sorted(gpus)))}" if gpus else "this machine shows none"
                yield f"gpus: there is no GPU {gpu}: {there}"
    if model.command is None:
        return
    path = model.env.get("PATH", os.environ.get("PATH", os.defpath))
    if shutil.which(model.command[0], path=path) is None:
        yield f"command: there is no program {model.command[0]!r} here: install it, or write its path"
