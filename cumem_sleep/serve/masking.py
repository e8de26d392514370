"""Keys stay where they belong: out of other servers' environments, and out of what people and logs are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
_LEAST_LETTERS = 12  # of a secret that is looked for inside of other words
_LEAST_SHOWN = 6  # of a secret that is masked wherever it stands
_WORD = r"(?:api[-_]?keys?|token|password|passwd|secret)"
_NAME = rf"(?:[\w-]{{0,60}}[-_])?{_WORD}"  # bounded, or a long line of dashes in a log would stop everything
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s;&|]+)"""
_MASKED = [
    # An option and its values, up to the next option; vLLM takes options that are cut short.
    (rf"((?<!-)--?(?:{_NAME}|ap(?:i(?:-(?:ke?)?)?)?))(?:=\s*{_VALUE}|(?:\s+(?!-){_VALUE})+)", rf"\1 {MASK}"),
    (rf"(\b(?:(?:\w*_)?{_WORD}|\w+_key)=){_VALUE}", rf"\1{MASK}"),
    (rf"""(["']{_NAME}["']\s*:\s*)(?:\[[^\[\]]*\]|"[^"]*"|'[^']*')""", rf"\1{MASK}"),
    (rf"(\b{_NAME}:[ \t]*)(?!//){_VALUE}", rf"\1{MASK}"),
    (r"(\bbearer\s+)[^\s'\"]+", rf"\1{MASK}"),
    (r"(://[^\s/@:]*:)[^\s/@]{4,}@", rf"\1{MASK}@"),
]
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in _MASKED]


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """A text, a command for instance, without these secrets, and without what its options and variables call a key."""
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    for secret in secrets:
        if len(secret) >= _LEAST_SHOWN:
            text = text.replace(secret, MASK)
    return text


def holds_any(value: str, secrets: Iterable[str]) -> bool:
    """Whether the value of a variable is one of these secrets, or has a long one in it."""
    return any(secret == value or (len(secret) >= _LEAST_LETTERS and secret in value) for secret in secrets)
