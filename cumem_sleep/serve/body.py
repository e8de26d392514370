"""Finds the `model` that a request's body names while the body arrives.

The body is looked at as a server reads it: of several `model`s the last one counts, keys may be escaped, and what lies
deeper is another's. It is not checked otherwise: what is wrong with it, its server says best. Each byte costs the same
time, whatever it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from ._json_scan import JsonScan

MOST_NAME_BYTES = 4096
_LONGEST_BOUNDARY = 256  # RFC 2046 allows 70
_LONGEST_PART_HEAD = 16 << 10
_MOST_PARTS = 2000  # as many fields and files as Starlette takes
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]+)"|([^;,\s"]+))', re.IGNORECASE)
# In lower case, so that it begins with plain letters: these are searched for fast.
_FIELD_NAME = re.compile(r'name=(?<=[;\s]name=)(?:"([^"\\]*)"|([^;\s"]+))')


class BadBody(Exception):
    """The body is not a JSON object or form, or its `model` is not a string."""


class JsonFinder:
    """Looks for the key `model` of a JSON object in UTF-8, with or without a byte order mark, that comes in pieces.

    Attributes:
        name: of the last model that was named so far.
        span: where in the body that name is written.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.span = (-1, -1)
        self._scan = JsonScan()

    @property
    def named(self) -> int:
        """How often a model has been named so far."""
        return self._scan.named

    @property
    def ended(self) -> bool:
        """Whether the body can name no other any more."""
        return self._scan.ended

    def look(self, data: bytes) -> None:
        """Look at the next piece.

        Raises:
            BadBody.
        """
        scan = self._scan
        scan.feed(data)
        if scan.is_too_long:
            raise BadBody(f"`model` has more than {MOST_NAME_BYTES} bytes")
        if not scan.is_object:
            raise BadBody("the body is not a JSON object in UTF-8")
        if self.span != (scan.start, scan.end):
            self.span = (scan.start, scan.end)
            self.name = _text(scan.token) if scan.end >= 0 else None

    def finish(self) -> None:
        """The body is at its end.

        Raises:
            BadBody: it ends in the middle, or its last model is no name.
        """
        if not self.ended:
            raise BadBody("the body ends before its JSON does")
        if self.named and self.name is None:
            raise BadBody("`model` is not a string")

    def written(self, name: str) -> bytes:
        """A name as a string in JSON."""
        return json.dumps(name).encode()


class FormFinder:
    """Looks for the field `model` of a form (multipart/form-data). It has what `JsonFinder` has."""

    def __init__(self, content_type: str) -> None:
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise BadBody("the content type names no boundary of the form")
        boundary = (found[1] or found[2]).encode("latin-1")
        if len(boundary) > _LONGEST_BOUNDARY:
            raise BadBody(f"the boundary of the form has more than {_LONGEST_BOUNDARY} bytes")
        self.name: str | None = None
        self.span = (-1, -1)
        self.named = 0
        self.ended = False
        self._boundary = b"\r\n--" + boundary
        self._read = bytearray()  # but what lies before `_at` and was looked at in earlier pieces
        self._gone = 0  # bytes of that
        self._at = 0
        self._parts = 0
        self._step: Callable[[], bool] = self._begin

    def look(self, data: bytes) -> None:
        """Look at the next piece. Raises as `JsonFinder.look`."""
        del self._read[: self._at]
        self._gone += self._at
        self._at = 0
        self._read += data
        while not self.ended and self._step():
            pass

    def finish(self) -> None:
        """The body is at its end. Raises as `JsonFinder.finish`."""
        if not self.ended:
            raise BadBody("the body ends before its form does")

    def written(self, name: str) -> bytes:
        """A name as a field has it."""
        return name.encode()

    def _begin(self) -> bool:
        first = self._boundary[2:]
        if len(self._read) < len(first):
            return False
        if self._read.startswith(first):
            self._at, self._step = len(first), self._read_head
        else:
            self._step = self._skip
        return True

    def _skip(self) -> bool:
        found = self._read.find(self._boundary, self._at)
        if found < 0:
            self._at = max(self._at, len(self._read) - len(self._boundary) + 1)
            return False
        self._at, self._step = found + len(self._boundary), self._read_head
        return True

    def _read_head(self) -> bool:
        if self._read[self._at : self._at + 2] == b"--":
            self.ended = True
            return False
        end = self._read.find(b"\r\n\r\n", self._at)
        if (end if end >= 0 else len(self._read)) - self._at > _LONGEST_PART_HEAD:
            raise BadBody("a field of the form has a header that does not end")
        if end < 0:
            return False
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise BadBody(f"the form has more than {_MOST_PARTS} fields")
        head = self._read[self._at : end].decode("latin-1")
        self._at = end + 2  # an empty field's boundary begins with the end of its header
        self._step = self._read_name if _is_model_field(head) else self._skip
        return True

    def _read_name(self) -> bool:
        end = self._read.find(self._boundary, self._at)
        if (end if end >= 0 else len(self._read)) - self._at > MOST_NAME_BYTES:
            raise BadBody(f"`model` has more than {MOST_NAME_BYTES} bytes")
        if end < 0:
            return False
        start = min(self._at + 2, end)
        self.span = (self._gone + start, self._gone + end)
        try:
            self.name = self._read[start:end].decode()
        except UnicodeDecodeError:
            raise BadBody("`model` is not valid UTF-8") from None
        self.named += 1
        self._at, self._step = end, self._skip
        return True


ModelFinder = JsonFinder | FormFinder


def finder_for(content_type: str) -> ModelFinder:
    """What looks through a body of this type; one that is not a form is taken for JSON.

    Raises:
        BadBody: a form whose type does not say where its fields end.
    """
    is_form = content_type.partition(";")[0].strip().lower() == "multipart/form-data"
    return FormFinder(content_type) if is_form else JsonFinder()


def renamed(pieces: Sequence[bytes], span: tuple[int, int], by: bytes) -> tuple[bytes, ...]:
    """A body in pieces with something else in one place, and no other byte changed. Long pieces are not copied."""
    at, before, after = 0, [], []
    for piece in pieces:
        before.append(piece[: max(span[0] - at, 0)])
        after.append(piece[max(span[1] - at, 0) :])
        at += len(piece)
    return (*before, by, *after)


def _is_model_field(head: str) -> bool:
    if "model" not in head:
        return False
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            lower = value.lower()
            found = _FIELD_NAME.search(lower)
            name = "" if found is None else value[slice(*found.span(found.lastindex or 0))]
            return name == "model" and "filename" not in lower
    return False


def _text(token: bytes) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        raise BadBody("`model` is not a string in JSON") from None
