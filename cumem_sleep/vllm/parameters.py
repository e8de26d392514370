"""The parameters of calls that change the sleep, from the query and from a JSON body: clients send them in either.

vLLM reads the query alone and drops what it does not know, so that a misspelt level 2 would be a sleep at level 1.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs

ParameterValues = tuple[str, ...]

LEVELS = ("0", "1", "2", "3")
MODES = ("abort", "wait", "keep")
MOST_BYTES = 64 << 10  # of a body
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_WAKE_TAGS = ("weights", "kv_cache", "scheduling")
ROUTES_NAMES = {"reset_connector": "reset_external"}  # where vLLM's route has another one than its call


class BadParameter(Exception):
    """A call is answered with 400; the text names the parameter and the value, and says what is allowed."""


def read(path: str, query: bytes, body: bytes, call: Mapping[str, inspect.Parameter]) -> dict[str, ParameterValues]:
    """The parameters of a call, as vLLM's query spells them.

    Args:
        path: of the gate's routes that change the sleep.
        query: the query string.
        body: empty, or a JSON object.
        call: the parameters of this vLLM's own call, whose switches and tags are passed on to it.

    Raises:
        BadParameter: one is unknown or has a bad value, or two places disagree.
    """
    known = _known(path, call)
    found: dict[str, ParameterValues] = {}
    queried = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for name, value in [*queried.items(), *_members(path, body)]:
        if name not in known:
            has = f"it has {' and '.join(known)}" if known else "it has none"
            raise BadParameter(f"{path} has no parameter {_shown(name)}: {has}")
        values = known[name](name, value)
        if found.setdefault(name, values) != values:
            raise BadParameter(
                f"{name} is given twice, as {', '.join(found[name])} and as {', '.join(values)}: give it once"
            )
    return found


def _members(path: str, body: bytes) -> list[tuple[str, object]]:
    """Of the JSON object in the body; a name that comes twice is there twice."""
    if not body.strip():
        return []
    expected = f"the body of {path}: expected nothing or a JSON object of its parameters"
    try:
        members = json.loads(body, object_pairs_hook=_Members)
    except (ValueError, RecursionError) as error:
        raise BadParameter(f"{expected} ({type(error).__name__})") from None
    if not isinstance(members, _Members):
        raise BadParameter(f"{expected}, and got {_shown(members)}")
    return list(members)


class _Members(list[tuple[str, object]]):
    """A JSON object's."""


def _one(name: str, value: object, expected: str) -> object:
    """The value of a parameter that has one: in a query it may come more than once, if it says the same."""
    if not isinstance(value, list) or isinstance(value, _Members):
        return value
    if len(set(map(repr, value))) != 1:
        raise BadParameter(f"{name}={_shown(value)}: expected one value, {expected}")
    return value[0]


def _level(name: str, value: object) -> ParameterValues:
    """As any version of vLLM reads it."""
    expected = "0, 1, 2 or 3"
    value = _one(name, value, expected)
    try:
        level = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        level = -1.0
    if level not in (0.0, 1.0, 2.0, 3.0):
        raise BadParameter(f"{name}={_shown(value)}: expected {expected}")
    return (LEVELS[int(level)],)


def _mode(name: str, value: object) -> ParameterValues:
    expected = "abort, wait or keep"
    value = _one(name, value, expected)
    if value not in MODES:
        raise BadParameter(f"{name}={_shown(value)}: expected {expected}")
    return (str(value),)


def _boolean(name: str, value: object) -> ParameterValues:
    expected = "true or false"
    value = _one(name, value, expected)
    text = json.dumps(value) if isinstance(value, bool) else str(value).lower()
    if text not in _BOOLEANS:
        raise BadParameter(f"{name}={_shown(value)}: expected {expected}")
    return (_BOOLEANS[text],)


def _tags(name: str, value: object) -> ParameterValues:
    """Without a tag twice, for which vLLM's executors fail after the wake. `null` is every tag, as none given is."""
    if value is None:
        return ()
    tags = value if isinstance(value, list) and not isinstance(value, _Members) else [value]
    if not tags or any(tag not in _WAKE_TAGS for tag in tags):
        expected = f"one or more of {', '.join(_WAKE_TAGS)}, or no {name} for all"
        raise BadParameter(f"{name}={_shown(tags[0] if len(tags) == 1 else tags)}: expected {expected}")
    return tuple(tag for tag in _WAKE_TAGS if tag in tags)


_GATES: dict[str, dict[str, Callable[[str, object], ParameterValues]]] = {
    "/sleep": {"level": _level, "mode": _mode, "keep_kv": _boolean},
    **{path: {"tags": _tags, "restore": _boolean} for path in ("/wake_up", "/wake")},
    "/pause": {"mode": _mode},
}


def _known(path: str, call: Mapping[str, inspect.Parameter]) -> Mapping[str, Callable[[str, object], ParameterValues]]:
    switches = [ROUTES_NAMES.get(name, name) for name, each in call.items() if "bool" in str(each.annotation)]
    tags = {"tags": _tags} if "tags" in call else {}
    return {**_GATES.get(path, {}), **tags, **dict.fromkeys(switches, _boolean)}


def _shown(value: object) -> str:
    text = repr(dict(value)) if isinstance(value, _Members) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
