"""Settings: one frozen dataclass; every field is also an environment variable `CUMEM_SLEEP_<FIELD>`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from .errors import MOST_BYTES, InvalidArgument, InvalidArgumentType, check_integer, shown

PREFIX = "CUMEM_SLEEP_"

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """How the layer behaves. Immutable; `Settings.from_environment()` is what the allocator uses by default.

    Attributes:
        driver: `cuda` opens libcuda, `sim` the simulated driver (no GPU needed, times mean nothing).
        host_budget_bytes: the most pinned host memory that backups may take, in bytes; None (unset): no budget. The
            environment variable also takes units: `30GiB`, `500MB`.
        retain_backups: keep backups in host memory after a wake, so that the next sleep copies only what changed.
        verify: `wake` checks the digest of every restored segment; `off` trusts the copies.
        poison: at the wake, fill dropped memory except `kv_cache` with 0xFF (NaN in every float type), so that weights
            that were not reloaded show.
        prefault_threads: threads that prefault new host memory ahead of the copies; None (unset): three for every four
            cores that this process may use, at most 16. It may be up to 1024.
        prepare: start `CuMemAllocator.prepare` automatically whenever a memory pool is left.
        prepare_bytes_per_second: the most that `prepare` copies per second while the model runs; 0: no limit. The
            environment variable also takes units: `5GB`.
        compress: `auto` compresses backups losslessly, segment by segment, where that is worth it; `off` stores the
            bytes as they are.
        vault: where backups are stored: `off`, in pinned memory of this process; `auto`, in the vault if one answers at
            its default socket, otherwise as `off`; or the path of a vault's socket.
        agreement_timeout_s: where several ranks sleep and wake together: how long a rank that is ready waits for the
            others before all undo their half.
        deep_after_s: seconds after which a process that sleeps at level 1 or 2 goes on to level 3 by itself; None
            (unset): never.

    Raises:
        InvalidArgument: a value is not allowed; the message names the field, the value and what is allowed.
    """

    driver: str = "cuda"
    host_budget_bytes: int | None = None
    retain_backups: bool = True
    verify: str = "wake"
    poison: bool = False
    prefault_threads: int | None = None
    prepare: bool = False
    prepare_bytes_per_second: int = 5_000_000_000
    compress: str = "off"
    vault: str = "off"
    agreement_timeout_s: float = 60.0
    deep_after_s: float | None = None

    def __post_init__(self) -> None:
        _one_of("driver", self.driver, ("cuda", "sim"))
        _one_of("verify", self.verify, ("off", "wake"))
        _one_of("compress", self.compress, ("off", "auto"))
        _vault("vault", self.vault)
        _integer("host_budget_bytes", self.host_budget_bytes, minimum=0)
        _integer("prefault_threads", self.prefault_threads, minimum=1, maximum=_MOST_THREADS)
        if self.prepare_bytes_per_second is None:
            raise InvalidArgumentType("prepare_bytes_per_second=None: expected a whole number")
        _integer("prepare_bytes_per_second", self.prepare_bytes_per_second, minimum=0)
        _seconds("agreement_timeout_s", self.agreement_timeout_s)
        if self.deep_after_s is not None:
            _seconds("deep_after_s", self.deep_after_s)
        for name in ("retain_backups", "poison", "prepare"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentType(f"{name}={getattr(self, name)!r}: expected True or False")

    def summary(self) -> str:
        """The fields that differ from their defaults, for a log line."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "settings: " + (", ".join(changed) or "the defaults")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Settings from `CUMEM_SLEEP_<FIELD>` variables; a variable that is unset or empty leaves the default.

        Raises:
            InvalidArgument: a variable has a bad value; the message names the variable, the value, what is allowed.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = PREFIX + field.name.upper()
            text = environment.get(variable, "").strip()
            if text:
                values[field.name] = _PARSERS[field.name](variable, text)
        return cls(**values)


def parse_bytes(name: str, text: str) -> int:
    """`"30GiB"`, `"500 MB"` or `"1073741824"` in bytes.

    Raises:
        InvalidArgument: not a number of bytes; the message starts with `name`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise InvalidArgument(f"{name}={text!r}: expected a number of bytes, such as 1073741824, 30GiB or 500MB")
    nbytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    check_integer(name, nbytes, minimum=0)
    return nbytes


def _parse_choice(*allowed: str) -> Any:
    def parse(variable: str, text: str) -> str:
        _one_of(variable, text, allowed)
        return text

    return parse


def parse_bool(variable: str, text: str) -> bool:
    """`"1"`, `"true"`, `"yes"`, `"on"`, and their opposites.

    Raises:
        InvalidArgument: none of these; the message starts with `variable`.
    """
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise InvalidArgument(f"{variable}={text!r}: expected one of {', '.join(_TRUE + _FALSE)}")


def _parse_threads(variable: str, text: str) -> int:
    # Python refuses to convert thousands of digits.
    threads = int(text) if text.isdecimal() and len(text) <= len(str(_MOST_THREADS)) else 0
    if not 1 <= threads <= _MOST_THREADS:
        raise InvalidArgument(f"{variable}={text!r}: expected a whole number from 1 to {_MOST_THREADS}")
    return threads


def _parse_seconds(variable: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _is_allowed(seconds):
        raise InvalidArgument(f"{variable}={text!r}: {_EXPECTED_SECONDS}")
    return seconds


def _parse_vault(variable: str, text: str) -> str:
    _vault(variable, text)
    return text


_PARSERS: dict[str, Any] = {
    "driver": _parse_choice("cuda", "sim"),
    "host_budget_bytes": parse_bytes,
    "retain_backups": parse_bool,
    "verify": _parse_choice("off", "wake"),
    "poison": parse_bool,
    "prefault_threads": _parse_threads,
    "prepare": parse_bool,
    "prepare_bytes_per_second": parse_bytes,
    "compress": _parse_choice("off", "auto"),
    "vault": _parse_vault,
    "agreement_timeout_s": _parse_seconds,
    "deep_after_s": _parse_seconds,
}
_MOST_THREADS = 1024
_MOST_S = 24 * 3600
_EXPECTED_SECONDS = f"expected seconds from 0.1 to {_MOST_S}"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{name}={value!r}: expected a string, one of {', '.join(allowed)}")
    if value not in allowed:
        raise InvalidArgument(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _vault(name: str, value: object) -> None:
    expected = "expected off, auto, or the path of a vault's socket (with a slash)"
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{name}={value!r}: {expected}")
    if value not in ("off", "auto") and ("/" not in value or "\0" in value):
        raise InvalidArgument(f"{name}={value!r}: {expected}")


def _integer(name: str, value: object, minimum: int, maximum: int = MOST_BYTES) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentType(f"{name}={value!r}: expected a whole number or None")
    check_integer(name, value, minimum, maximum)


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentType(f"{name}={value!r}: {_EXPECTED_SECONDS}")
    if not _is_allowed(value):
        raise InvalidArgument(f"{name}={shown(value)}: {_EXPECTED_SECONDS}")


def _is_allowed(seconds: float) -> bool:
    return 0.1 <= seconds <= _MOST_S  # nor NaN
