"""Environment variables with this package's prefix that nothing reads: probably misspelt."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from ..settings import PREFIX, VARIABLES
from . import log

_OF_BUILDS_AND_TESTS = tuple(PREFIX + name for name in ("TEST_", "SANITIZE", "WERROR"))  # CONTRIBUTING has them
_warned_of: set[str] = set()


def hidden(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables as people may see them: a token is not shown, whatever the rest of its name is."""
    return {name: "…" if "TOKEN" in name and text else text for name, text in environment.items()}


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with our prefix that nothing reads, each with the most similar name that exists, or ""."""
    ours = (name for name in environment if name.startswith(PREFIX) and not name.startswith(_OF_BUILDS_AND_TESTS))
    unknown = sorted(name for name in ours if name not in VARIABLES)
    names = [name.removeprefix(PREFIX) for name in sorted(VARIABLES)]  # with the prefix, all names would be similar
    nearest = {name: difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1) for name in unknown}
    return {name: PREFIX + found[0] if found else "" for name, found in nearest.items()}


def warn_of_misspelt() -> None:
    """Log each such variable of this process once."""
    for name, nearest in misspelt(os.environ).items():
        if name not in _warned_of:
            _warned_of.add(name)
            log.warning("%s is set, but nothing reads it%s", name, f": did you mean {nearest}?" if nearest else "")
