"""Finds the `model` that a request's body names while the body arrives, so that no more of it is read than that takes.

The body is looked at as a server would read it, not checked: what is wrong with it, its server says best. If `model`
comes twice, the first one decides where the request goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

MOST_STRUCTURE = 1_000_000  # brackets, strings and commas: each of them costs time
MOST_NAME_BYTES = 4096
_LONGEST_KEY = 64  # of `model`, however it is escaped
_LONGEST_PART_HEAD = 16 << 10
_MOST_PARTS = 10_000
_BACKSLASH = 0x5C
_STRUCTURE = re.compile(rb'["{}\[\]]')
_TOP_LEVEL = re.compile(rb'["{}\[\],:]')
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]+)"|([^;,\s"]+))', re.IGNORECASE)
_FIELD_NAME = re.compile(r';\s*name=(?:"([^"\\]*)"|([^;\s"]+))', re.IGNORECASE)


class BadBody(Exception):
    """The body is not a JSON object or form, or its `model` is not a string."""


class TooMuchStructure(Exception):
    """`model` comes after too many brackets, strings or form fields."""


class ModelFinder(Protocol):
    """Looks for `model` in a body that comes in pieces.

    Attributes:
        read: all that came so far.
        name: of the model, once it is found.
        ended: the body can name no model any more.
    """

    read: bytearray
    name: str | None
    ended: bool

    def feed(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            BadBody, TooMuchStructure.
        """

    def renamed(self, name: str) -> bytearray:
        """All that was read, with another name for the model and no other byte changed."""


class JsonFinder:
    """Looks for the key `model` of a JSON object in UTF-8."""

    def __init__(self) -> None:
        self.read = bytearray()
        self.name: str | None = None
        self.ended = False
        self._span = (0, 0)
        self._at = 0
        self._depth = 0
        self._structure = 0
        self._string_at = -1  # where the string begins that is not at its end yet
        self._expected = b"{"  # what has to come next, but for spaces
        self._is_key = self._is_model = False  # the next string

    def feed(self, data: bytes) -> None:
        """Take the next piece. Raises as `ModelFinder.feed`."""
        self.read += data
        while self.name is None and not self.ended and self._step():
            pass

    def renamed(self, name: str) -> bytearray:
        """All that was read, with another name for the model."""
        start, end = self._span
        return self.read[:start] + json.dumps(name).encode() + self.read[end:]

    def _step(self) -> bool:
        """Go on to the next piece of structure; whether it is there yet."""
        if self._string_at >= 0:
            return self._end_string()
        if self._expected:
            found = _NOT_SPACE.search(self.read, self._at)
            if found is not None and found[0] != self._expected[:1]:
                raise BadBody("`model` is not a string" if self._is_model else "the body is not a JSON object in UTF-8")
        else:
            found = (_TOP_LEVEL if self._depth == 1 else _STRUCTURE).search(self.read, self._at)
        if found is None:
            self._at = len(self.read)
            return False
        self._expected = self._expected[1:]
        self._take(found[0], found.start())
        return True

    def _take(self, character: bytes, at: int) -> None:
        self._at = at + 1
        self._structure += 1
        if self._structure > MOST_STRUCTURE:
            raise TooMuchStructure
        if character == b'"':
            self._string_at = at
        elif character in b"{[":
            self._depth += 1
            self._is_key = self._depth == 1
        elif character in b"}]":
            self._depth -= 1
            self.ended = self._depth == 0
        elif self._depth == 1:
            self._is_key = character == b","

    def _end_string(self) -> bool:
        while (quote := self.read.find(b'"', self._at)) >= 0:
            self._at = quote + 1
            before = quote
            while self.read[before - 1] == _BACKSLASH:  # the quote that opens the string is none
                before -= 1
            if (quote - before) % 2 == 0:
                self._take_string(self._string_at, quote + 1)
                self._string_at = -1
                return True
        self._at = len(self.read)
        if self._is_model:
            _check_length(self._at - self._string_at)
        return False

    def _take_string(self, start: int, end: int) -> None:
        if self._is_model:
            _check_length(end - start)
            self.name, self._span = _text(self.read[start:end]), (start, end)
            if self.name is None:
                raise BadBody("`model` is not a string in JSON")
        elif self._depth == 1 and self._is_key and _text(self.read[start : min(end, start + _LONGEST_KEY)]) == "model":
            self._is_model, self._expected = True, b':"'


class FormFinder:
    """Looks for the field `model` of a form (multipart/form-data)."""

    def __init__(self, content_type: str) -> None:
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise BadBody("the content type names no boundary of the form")
        self.read = bytearray()
        self.name: str | None = None
        self.ended = False
        self._span = (0, 0)
        self._boundary = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._at = 0
        self._parts = 0
        self._step: Callable[[], bool] = self._begin

    def feed(self, data: bytes) -> None:
        """Take the next piece. Raises as `ModelFinder.feed`."""
        self.read += data
        while self.name is None and not self.ended and self._step():
            pass

    def renamed(self, name: str) -> bytearray:
        """All that was read, with another name for the model."""
        start, end = self._span
        return self.read[:start] + name.encode() + self.read[end:]

    def _begin(self) -> bool:
        first = self._boundary[2:]
        if len(self.read) < len(first):
            return False
        if self.read.startswith(first):
            self._at, self._step = len(first), self._read_head
        else:
            self._step = self._skip
        return True

    def _skip(self) -> bool:
        found = self.read.find(self._boundary, self._at)
        if found < 0:
            self._at = max(self._at, len(self.read) - len(self._boundary) + 1)
            return False
        self._at, self._step = found + len(self._boundary), self._read_head
        return True

    def _read_head(self) -> bool:
        if self.read[self._at : self._at + 2] == b"--":
            self.ended = True
            return False
        end = self.read.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self.read) - self._at > _LONGEST_PART_HEAD:
                raise BadBody("a field of the form has a header that does not end")
            return False
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise TooMuchStructure
        head = self.read[self._at : end].decode("latin-1")
        self._at = end + 2  # an empty field's boundary begins with the end of its header
        self._step = self._read_name if _is_model_field(head) else self._skip
        return True

    def _read_name(self) -> bool:
        end = self.read.find(self._boundary, self._at)
        _check_length((end if end >= 0 else len(self.read)) - self._at)
        if end < 0:
            return False
        self._span = (min(self._at + 2, end), end)
        try:
            self.name = self.read[slice(*self._span)].decode()
        except UnicodeDecodeError:
            raise BadBody("`model` is not valid UTF-8") from None
        return True


def finder_for(content_type: str) -> ModelFinder:
    """What looks through a body of this type; one that is not a form is taken for JSON.

    Raises:
        BadBody: a form whose type does not say where its fields end.
    """
    is_form = content_type.partition(";")[0].strip().lower() == "multipart/form-data"
    return FormFinder(content_type) if is_form else JsonFinder()


def _is_model_field(head: str) -> bool:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            found = _FIELD_NAME.search(value)
            return found is not None and (found[1] or found[2]) == "model" and "filename" not in value.lower()
    return False


def _text(token: bytearray) -> str | None:
    try:
        return str(json.loads(token))
    except ValueError:
        return None


def _check_length(nbytes: int) -> None:
    if nbytes > MOST_NAME_BYTES:
        raise BadBody(f"`model` has more than {MOST_NAME_BYTES} bytes")
