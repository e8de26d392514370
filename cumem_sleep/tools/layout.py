"""How tensors are packed into segments: as PyTorch's caching allocator would do it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .safetensors import Tensor

PAGE_BYTES = 2 << 20
"""The smallest unit that CUDA maps; the size of a segment is a multiple of it."""

PIECE_BYTES = 32 << 20
"""The most that is copied at a time."""

# As in PyTorch's caching allocator: blocks are multiples of 512 bytes; small ones share a segment, large ones do not.
_BLOCK_BYTES = 512
_SHARED_SEGMENT_BYTES = 20 << 20
_LARGE_BYTES = 10 << 20
_OPEN_SEGMENTS = 16  # searched for room


@dataclass
class SegmentLayout:
    """Tensors that share one segment, each with its offset; `address` once there is memory for them."""

    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    nbytes: int = 0
    address: int = 0

    def add(self, tensor: Tensor) -> None:
        """Append it."""
        self.tensors.append((self.nbytes, tensor))
        self.nbytes += -(-tensor.data.size // _BLOCK_BYTES) * _BLOCK_BYTES

    def pieces(self) -> Iterator[DevicePiece]:
        """The segment, cut into pieces of at most `PIECE_BYTES`."""
        for start in range(0, self.nbytes, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, self.nbytes - start)
            parts = []
            for offset, tensor in self.tensors:
                first, last = max(start, offset), min(start + nbytes, offset + tensor.data.size)
                if first < last:
                    parts.append((first - start, tensor, first - offset, last - first))
            yield DevicePiece(self.address + start, nbytes, tuple(parts))


@dataclass(frozen=True)
class DevicePiece:
    """A range of device memory, and its parts: offset in the piece, tensor, offset in the tensor, size."""

    address: int
    nbytes: int
    parts: tuple[tuple[int, Tensor, int, int], ...]


def lay_out(tensors: Iterable[Tensor]) -> list[SegmentLayout]:
    """Pack tensors into segments: those above 10 MiB get their own, smaller ones go where there is room."""
    segments: list[SegmentLayout] = []
    shared: deque[SegmentLayout] = deque(maxlen=_OPEN_SEGMENTS)
    for tensor in tensors:
        if tensor.data.size == 0:
            continue
        is_large = tensor.data.size > _LARGE_BYTES
        fitting = (open_ for open_ in shared if open_.nbytes + tensor.data.size <= _SHARED_SEGMENT_BYTES)
        segment = None if is_large else next(fitting, None)
        if segment is None:
            segment = SegmentLayout()
            segments.append(segment)
            if not is_large:
                shared.append(segment)
        segment.add(tensor)
    return segments


def whole_pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
