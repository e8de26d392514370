"""Settings of the HTTP gate, from the environment of `vllm serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidArgument, InvalidArgumentType
from ..settings import PREFIX, parse_bytes

_CHOICES = {"on_request": ("reject", "wait", "wake"), "health": ("auto", "ok", "unavailable")}
_COUNTS = ("max_held_requests", "max_held_bytes")
_SECONDS = {"request_deadline_s": 0, "retry_after_s": 1}  # the least that is allowed
_MOST_S = 86_400


@dataclass(frozen=True)
class GateSettings:
    """How the gate answers for a sleeping model. Immutable; `CUMEM_SLEEP_<FIELD>` in the environment.

    Attributes:
        on_request: what happens to an inference request while the model sleeps: `reject` (503 at once), `wait` (held
            until somebody wakes the model), `wake` (the request wakes it).
        request_deadline_s: how long `wait` and `wake` hold a request before it gets its 503.
        retry_after_s: the `Retry-After` of the 503, in whole seconds; also the pause after a failed wake.
        health: how `/health` and `/ping` answer while the model sleeps: `ok` (200), `unavailable` (503), or `auto`: 200
            if requests would be served, that is with `wait` and `wake`.
        admin_token: if set, whatever changes the server's state (sleep, wake, weight updates, adapters, …) needs
            `Authorization: Bearer <token>`.
        max_held_requests: how many requests `wait` and `wake` hold at once; further ones get 503.
        max_held_bytes: how many bytes their bodies may have in total.
        loading_methods: a trainer's own worker methods that load all weights when `/collective_rpc` calls them;
            separated by commas in the environment.

    Raises:
        InvalidArgument: a value is not allowed; the message names the field, the value and what is allowed.
    """

    on_request: str = "reject"
    request_deadline_s: float = 60.0
    retry_after_s: int = 5
    health: str = "auto"
    admin_token: str | None = field(default=None, repr=False)
    max_held_requests: int = 4096
    max_held_bytes: int = 256 << 20
    loading_methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _CHOICES:
            _check_choice(name, name, getattr(self, name))
        for name in _SECONDS:
            _check_seconds(name, name, getattr(self, name))
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        _check_methods("loading_methods", self.loading_methods)
        if self.admin_token is not None:
            _check_token("admin_token", self.admin_token)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> GateSettings:
        """Settings from `CUMEM_SLEEP_<FIELD>` variables; a variable that is unset or empty leaves the default.

        An empty token is an error, though: it would leave open what somebody wanted to protect.

        Raises:
            InvalidArgument: a variable has a bad value; the message names the variable, the value (never a token's)
                and what is allowed.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for each in fields(cls):
            variable = PREFIX + each.name.upper()
            text = environment.get(variable, "")
            if each.name == "admin_token":
                if variable in environment:
                    _check_token(variable, text)
                    values[each.name] = text
            elif text.strip():
                values[each.name] = _parse(variable, each.name, text.strip())
        return cls(**values)


def _parse(variable: str, name: str, text: str) -> str | float | tuple[str, ...]:
    if name in _CHOICES:
        _check_choice(variable, name, text)
        return text
    if name == "loading_methods":
        methods = tuple(method.strip() for method in text.split(","))
        _check_methods(variable, methods)
        return methods
    if name in _COUNTS:
        if name == "max_held_bytes":
            return parse_bytes(variable, text)
        try:
            count = int(text)
        except ValueError:
            raise InvalidArgument(f"{variable}={text!r}: {_EXPECTED_COUNT}") from None
        _check_count(variable, count)
        return count
    try:
        seconds: float = int(text) if name == "retry_after_s" else float(text)
    except ValueError:
        raise InvalidArgument(f"{variable}={text!r}: {_expected_seconds(name)}") from None
    _check_seconds(variable, name, seconds)
    return seconds


def _check_choice(label: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{label}={value!r}: expected a string, one of {', '.join(_CHOICES[name])}")
    if value not in _CHOICES[name]:
        raise InvalidArgument(f"{label}={value!r}: expected one of {', '.join(_CHOICES[name])}")


def _check_seconds(label: str, name: str, value: object) -> None:
    wanted: tuple[type, ...] = (int,) if name == "retry_after_s" else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise InvalidArgumentType(f"{label}={value!r}: {_expected_seconds(name)}")
    assert isinstance(value, (int, float))
    if not _SECONDS[name] <= value <= _MOST_S:  # nor NaN
        raise InvalidArgument(f"{label}={value!r}: {_expected_seconds(name)}")


_EXPECTED_COUNT = "expected a whole number of at least 0"


def _check_count(label: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentType(f"{label}={value!r}: {_EXPECTED_COUNT}")
    if value < 0:
        raise InvalidArgument(f"{label}={value!r}: {_EXPECTED_COUNT}")


def _check_methods(label: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(method, str) for method in value):
        raise InvalidArgumentType(f"{label}={value!r}: expected a tuple of method names")
    if bad := [method for method in value if not method.isidentifier()]:
        names = ",".join(value)
        raise InvalidArgument(f"{label}={names!r}: {bad[0]!r} is not a method name (names are separated by commas)")


def _expected_seconds(name: str) -> str:
    kind = "a whole number of seconds" if name == "retry_after_s" else "seconds"
    return f"expected {kind} from {_SECONDS[name]} to {_MOST_S}"


def _check_token(label: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentType(f"{label}: expected a string")
    if not value or not all("!" <= letter <= "~" for letter in value):
        raise InvalidArgument(
            f"{label}: expected printable ASCII without spaces, at least one character (unset: no token)"
        )
