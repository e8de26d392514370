"""The processes that sleep and wake together, as those who start them know them: `torch.distributed`'s groups."""

from __future__ import annotations

import importlib.util
import socket
from typing import Any, Protocol

from ..errors import InvalidArgument, InvalidArgumentType


class RankGroup(Protocol):
    """The processes that belong together. `all_gather` is called by all of them, in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        address: where processes of other hosts reach this one.
    """

    rank: int
    size: int
    address: str

    def all_gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank; values are plain and can be pickled."""


def as_group(group: Any) -> RankGroup:
    """The group of the ranks that sleep and wake together: one of `torch.distributed`, or what is one already.

    Raises:
        InvalidArgument: neither, or not one with a CPU backend that this process is in.
    """
    if all(hasattr(group, name) for name in ("rank", "size", "address", "all_gather")):
        return group  # type: ignore[no-any-return]
    wanted = "expected a torch.distributed process group with a CPU backend (gloo)"
    if importlib.util.find_spec("torch") is None:
        raise InvalidArgumentType(f"group={group!r}: {wanted}, but PyTorch is not installed")
    from torch import distributed

    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise InvalidArgumentType(f"group={group!r}: {wanted}")
    backend = str(distributed.get_backend(group))
    if backend == "nccl":
        raise InvalidArgument(f"group with backend {backend!r}: {wanted}")
    return TorchGroup(group)


class TorchGroup:
    """A process group of `torch.distributed`, as `ranks` wants it."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        self._distributed = distributed
        self._group = group
        self.rank = int(distributed.get_rank(group))
        self.size = int(distributed.get_world_size(group))
        self.address = address_of_this_host()

    def all_gather(self, value: Any) -> list[Any]:
        """By gloo, which has to be whole for that."""
        gathered: list[Any] = [None] * self.size
        self._distributed.all_gather_object(gathered, value, group=self._group)
        return gathered


def address_of_this_host() -> str:
    """Where other hosts reach it, as gloo finds out: by its name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
