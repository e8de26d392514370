"""The list of all environment variables of this package, so that a misspelt one can be noticed."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from . import log
from .settings import PREFIX, Settings

_OF_SETTINGS = tuple(field.name.upper() for field in fields(Settings))
# The fields of `vllm.gate_settings.GateSettings`, which this module must not import.
_OF_THE_GATE = (
    *("ADMIN_TOKEN", "HEALTH", "ON_REQUEST", "REQUEST_DEADLINE_S", "RETRY_AFTER_S"),
    *("MAX_HELD_REQUESTS", "MAX_HELD_BYTES", "LOADING_METHODS"),
)
# Those that no dataclass documents.
_OTHERS = {
    "DISABLE": "1: the vLLM plugin does nothing, and vLLM keeps its own sleep mode",
    "VLLM_UNTESTED": "1: the vLLM plugin also serves versions of vLLM that were not tested, if their interface fits",
    "SERVE_URL": "the front that `cumem-sleep status`, `sleep`, `wake` and `stop` ask (http://127.0.0.1:8000)",
    "SERVE_TOKEN": "the admin token that they send, or for `status` an API key",
    "SIM_DEVICES": "how many GPUs the simulated driver has (1)",
    "SIM_DEVICE_ORDER": "numbers of the host's GPUs, in the order of the simulated driver's ordinals",
    "SIM_DEVICE_BYTES": "memory of each simulated GPU, in bytes",
    "SIM_CONTEXT_BYTES": "memory that a context takes on a simulated GPU, in bytes (0)",
    "SIM_CONTEXT_US_PER_MIB": "microseconds that a new context takes for each MiB of registered host memory (0)",
    "SIM_FAIL": "failures that the simulated driver starts with, as cuMemCreate:0:CUDA_ERROR_OUT_OF_MEMORY:1",
    "SIM_DRIVER_VERSION": "the version that the simulated driver reports (13000)",
    "SIM_COPY_DELAY_US": "how much longer each simulated copy takes, in microseconds (200)",
    "SIM_FABRIC": "1: simulated GPUs claim to support fabric handles",
    "SIM_HOST_POINTERS": "0: simulated GPUs cannot access registered memory by its host address",
    "SANITIZE": "what `pip install` passes to the compiler's -fsanitize",
    "WERROR": "1: compiler warnings are errors in `pip install`",
    "TEST_DRIVER": "cuda: the test suite runs on a GPU (sim)",
    "TEST_BEGUN": "a file of tests to leave out, to which each test that begins is added",
    "TEST_HISTORIES": "how many random histories the test suite runs (24)",
    "TEST_HISTORY": "the number of the only random history that it runs",
    "TEST_STORM_S": "how many seconds each storm of signals or finalisers lasts (4)",
    "TEST_RANKS": "1: ranks fail at every position of every driver call, and are killed at every step",
    "TEST_VAULT_KILLS": "how often a vault at work is killed (6)",
    "TEST_GATE_SECONDS": "how long new random episodes at the gate are started, in seconds (20)",
    "TEST_GATE_SEED": "the number of the first of them (300)",
}

KNOWN = frozenset(PREFIX + name for name in (*_OF_SETTINGS, *_OF_THE_GATE, *_OTHERS))
OTHERS: Mapping[str, str] = {PREFIX + name: text for name, text in _OTHERS.items()}

_warned_of: set[str] = set()


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables as people may see them: a token is not shown, whatever the rest of its name is."""
    return {name: "…" if "TOKEN" in name and text else text for name, text in environment.items()}


def described(settings: Any) -> dict[str, str]:
    """The variable of each field of a settings dataclass, with its description in the class's docstring."""
    attributes = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    texts = {
        name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.M)
    }
    described = {}
    for field in fields(settings):
        default = "" if field.default in (None, MISSING) else f" (default: {_as_text(field.default)})"
        described[PREFIX + field.name.upper()] = texts.get(field.name, "").rstrip(".") + default
    return described


def _as_text(default: object) -> str:
    return str(int(default)) if isinstance(default, bool) else str(default)


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with our prefix that nothing reads, each with the most similar name that exists, or ""."""
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in KNOWN)
    names = [name.removeprefix(PREFIX) for name in sorted(KNOWN)]  # with the prefix, all names would be similar
    nearest = {name: difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1) for name in unknown}
    return {name: PREFIX + found[0] if found else "" for name, found in nearest.items()}


def warn_of_misspelt() -> None:
    """Log each such variable of this process once."""
    for name, nearest in misspelt(os.environ).items():
        if name not in _warned_of:
            _warned_of.add(name)
            log.warning("%s is set, but nothing reads it%s", name, f": did you mean {nearest}?" if nearest else "")
