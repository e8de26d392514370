"""Tags: which words can be one, and which of them memory was ever given."""

from __future__ import annotations

from collections.abc import Iterable

from .. import _core
from ..errors import InvalidArgument, InvalidArgumentType, shown

DEFAULT_TAG = "default"
GRAPH_TAG = "cudagraph"
RUNTIME_TAG = "runtime"  # vLLM's tag for memory that belongs to no model, such as LoRA's buffers


class UsedTags:
    """The tags of memory so far. A call that names another one has probably misspelt it."""

    def __init__(self, always: Iterable[str]) -> None:
        """
        Args:
            always: tags that count from the first.
        """
        self._added = set(always)

    def add(self, tag: str) -> None:
        """It counts from now on, though nothing may have been allocated with it."""
        self._added.add(tag)

    def all(self) -> set[str]:
        """Every tag that counts."""
        return {*self._added, *(segment.tag for segment in _core.segments())}  # hooks do not add theirs

    def checked(self, tags: str | Iterable[str]) -> set[str]:
        """The tags, if each of them counts.

        Raises:
            InvalidArgument: one does not.
        """
        chosen = checked_tags(tags, "tags")
        others = chosen - self._added
        if others and (unknown := others - (known := self.all())):
            raise InvalidArgument(
                f"tags={sorted(unknown)!r}: no memory was ever given such a tag; known are {', '.join(sorted(known))}"
            )
        return chosen

    def to_back_up(self, tags: str | Iterable[str]) -> set[str]:
        """The tags. vLLM names all that it may use; but if not one counts they are misspelt, and all would be lost.

        Raises:
            InvalidArgument: not one counts.
        """
        chosen = checked_tags(tags, "offload_tags")
        known = {DEFAULT_TAG, RUNTIME_TAG, GRAPH_TAG, *self.all()}
        if chosen and not chosen & known:
            raise InvalidArgument(
                f"offload_tags={sorted(chosen)!r}: no memory was ever given any of these tags, so everything would be"
                f" dropped; known are {', '.join(sorted(known))}. offload_tags=() drops everything"
            )
        return chosen


def tag_or_default(tag: str | None) -> str:
    """The tag; `default` for None.

    Raises:
        InvalidArgument: as `checked_tag`.
    """
    return DEFAULT_TAG if tag is None else checked_tag(tag)


def checked_tag(tag: object) -> str:
    """Returns the tag, as a plain string, if it is valid.

    Raises:
        InvalidArgument: it is not a string, is empty, or cannot be passed to C++.
    """
    if not isinstance(tag, str):
        raise InvalidArgumentType(f"tag={shown(tag)}: expected a string")
    tag = str.__str__(tag)  # of a class of its own it may compare in another way, or have no hash
    if not tag or "\0" in tag:
        raise InvalidArgument(f"tag={tag!r}: a tag has at least one character, and no null characters")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"tag={tag!r}: not valid Unicode") from None
    return tag


def checked_tags(tags: object, name: str) -> set[str]:
    """The tags in the argument called `name`, which is one tag or several.

    Raises:
        InvalidArgument: it contains something that is not a tag.
    """
    if isinstance(tags, str):
        tags = (tags,)
    if not isinstance(tags, Iterable) or isinstance(tags, bytes):
        raise InvalidArgumentType(f"{name}={shown(tags)}: expected a string or several strings")
    try:
        each = iter(tags)
    except TypeError:  # of an array without dimensions, which is Iterable by its class
        raise InvalidArgumentType(f"{name}={shown(tags)}: expected a string or several strings") from None
    return {checked_tag(tag) for tag in each}
