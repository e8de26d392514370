"""The segments that the benchmark works on: as requested, or as much as fits; checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ... import _core
from ...core.commitment import HOST_RESERVE_BYTES
from ...errors import InvalidArgument, format_bytes
from ...settings import Settings
from ..layout import PAGE_BYTES
from ..simulated import host_memory_left

# Qwen3-32B in bf16, with the weights of each layer fused as in vLLM.
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE, _VOCABULARY = 5120, 64, 64, 8, 128, 25600, 151936
_LAYER_SHAPES = {
    "qkv_proj": ((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, _HIDDEN),
    "o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
    "gate_up_proj": (2 * _INTERMEDIATE, _HIDDEN),
    "down_proj": (_HIDDEN, _INTERMEDIATE),
}
_LAYER_PAGES = tuple(-(-2 * rows * columns // PAGE_BYTES) for rows, columns in _LAYER_SHAPES.values())
_EMBEDDING_PAGES = -(-2 * _VOCABULARY * _HIDDEN // PAGE_BYTES)
_MODEL_PAGES = 2 * _EMBEDDING_PAGES + _LAYERS * sum(_LAYER_PAGES)
MODEL_WEIGHTS_BYTES = _MODEL_PAGES * PAGE_BYTES
_MODEL_KV_BYTES = int(54.63 * (1 << 30)) // PAGE_BYTES * PAGE_BYTES  # as vLLM 0.26 chose it on an H200
_LEAST_MODEL_BYTES = -(-_MODEL_PAGES // _EMBEDDING_PAGES) * PAGE_BYTES  # so that every segment has a page
_SIMULATED_WEIGHTS_BYTES, _SIMULATED_KV_BYTES = 256 << 20, 128 << 20

_DEVICE_RESERVE_BYTES = 1 << 30  # kept free for the context and the kernels
_SIMULATED_HOST_RESERVE_BYTES = 256 << 20
_PINNED_PER_DEVICE_BYTE = 512  # pinned host memory takes that share of device memory, for the GPU's page tables
_SMALLER, _TIMES = 0.8, 20  # what was not requested is made smaller in these steps until it fits


@dataclass(frozen=True)
class Workload:
    """The segments: sizes in bytes, each a multiple of 2 MiB.

    Attributes:
        name: what they are modelled on.
        why: how sizes were chosen that were not requested; "" otherwise.
    """

    name: str
    weights: tuple[int, ...]
    kv_cache: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class Room:
    """How much room there is.

    Attributes:
        device_bytes: free on the GPU, less a reserve.
        host_bytes: what the tightest limit leaves for backups, less a reserve.
        host_limit: which limit that is; "" if none is known.
        simulated: the device is host memory too.
    """

    device: int
    device_bytes: int
    host_bytes: int
    host_limit: str
    simulated: bool

    @classmethod
    def now(cls, device: int, settings: Settings) -> Room:
        """The room on this machine.

        Raises:
            InvalidArgument: no such device.
            DriverError: the device does not respond.
        """
        count = _core.device_count()
        if not 0 <= device < count:
            raise InvalidArgument(f"--device {device}: there are {count}, numbered from 0")
        simulated = _core.driver_is_simulated()
        reserve = _SIMULATED_HOST_RESERVE_BYTES if simulated else HOST_RESERVE_BYTES
        left = {name: max(0, nbytes - reserve) for name, nbytes in host_memory_left().items() if nbytes is not None}
        if settings.host_budget_bytes is not None:
            left["budget"] = settings.host_budget_bytes
        tightest = min(left, key=left.__getitem__, default="")
        free_bytes, _ = _core.memory_info(device)
        device_bytes = max(0, free_bytes - (0 if simulated else _DEVICE_RESERVE_BYTES))
        return cls(device, device_bytes, left.get(tightest, 1 << 62), tightest, simulated)

    def holds(self, weights_bytes: int, kv_bytes: int) -> bool:
        """Whether both fit, together with the backups of the weights."""
        on_device = weights_bytes + kv_bytes
        if self.simulated:
            return on_device <= self.device_bytes and on_device + weights_bytes <= self.host_bytes
        pinned = weights_bytes // _PINNED_PER_DEVICE_BYTE
        return on_device + pinned <= self.device_bytes and weights_bytes <= self.host_bytes

    def __str__(self) -> str:
        host = f", {format_bytes(self.host_bytes)} on the host ({self.host_limit})" if self.host_limit else ""
        return f"device {self.device} has room for {format_bytes(self.device_bytes)}{host}"


def plan(weights_bytes: int | None, kv_bytes: int | None, segment_bytes: int | None, room: Room) -> Workload:
    """The segments as requested, or (None) those of a 32B model, smaller where they do not fit.

    Args:
        segment_bytes: the size of every segment of the weights; None: those that the model has.

    Raises:
        InvalidArgument: the sizes do not fit, or are too small.
    """
    model, weights, kv_cache = "a Qwen3-32B beside vLLM on an H200", MODEL_WEIGHTS_BYTES, _MODEL_KV_BYTES
    if room.simulated:
        model, weights, kv_cache = "a small simulated model", _SIMULATED_WEIGHTS_BYTES, _SIMULATED_KV_BYTES
    share = 1.0
    for _ in range(_TIMES):
        sizes = weights_bytes or _pages_within(weights * share), kv_bytes or _pages_within(kv_cache * share)
        if room.holds(*sizes):
            break
        share *= _SMALLER
    else:
        said = " and ".join(map(format_bytes, sizes))
        raise InvalidArgument(f"weights and a KV cache of {said} do not fit: {room}; choose smaller --weights and --kv")
    why = "" if weights_bytes and kv_bytes else f"{share:.0%} of {model}: {room}"
    if segment_bytes is None:
        return Workload("Qwen3-32B-like", model_like(sizes[0]), kv_segments(sizes[1]), why)
    name = f"equal segments of {format_bytes(segment_bytes)}"
    return Workload(name, equal_segments(sizes[0], segment_bytes), kv_segments(sizes[1]), why)


def model_like(nbytes: int) -> tuple[int, ...]:
    """The 258 segments of a Qwen3-32B, scaled to `nbytes` and rounded down to pages; small sizes have fewer layers.

    Raises:
        InvalidArgument: too small for a single layer.
    """
    if nbytes < _LEAST_MODEL_BYTES:
        raise InvalidArgument(
            f"--weights {format_bytes(nbytes)}: a model takes at least {format_bytes(_LEAST_MODEL_BYTES)};"
            " --segment-size allows less"
        )
    pages = nbytes // PAGE_BYTES
    layers = min(_LAYERS, pages * _LAYERS * min(_LAYER_PAGES) // _MODEL_PAGES)
    embedding = layers * _EMBEDDING_PAGES
    layer = [_LAYERS * part for part in _LAYER_PAGES]
    return _spread(pages, [embedding, *(layer * layers), embedding])


def equal_segments(nbytes: int, segment_bytes: int) -> tuple[int, ...]:
    """As many segments of this size as fit into `nbytes`.

    Raises:
        InvalidArgument: the size is not in whole pages, or not even one segment fits.
    """
    if segment_bytes % PAGE_BYTES or segment_bytes < PAGE_BYTES:
        raise InvalidArgument(f"--segment-size {segment_bytes}: expected a multiple of {format_bytes(PAGE_BYTES)}")
    if nbytes < segment_bytes:
        raise InvalidArgument(
            f"--segment-size {format_bytes(segment_bytes)}: larger than the weights ({format_bytes(nbytes)})"
        )
    return (segment_bytes,) * (nbytes // segment_bytes)


def kv_segments(nbytes: int) -> tuple[int, ...]:
    """One segment for each layer of the model, as in vLLM; fewer if there are fewer pages."""
    pages = -(-nbytes // PAGE_BYTES)
    return _spread(pages, [1] * min(_LAYERS, pages))


def _spread(pages: int, shares: Sequence[int]) -> tuple[int, ...]:
    """`pages` divided in proportion to `shares`: sizes in bytes, in whole pages, which add up to `pages`."""
    total = sum(shares)
    ends = [pages * end // total for end in accumulate(shares, initial=0)]
    return tuple((end - start) * PAGE_BYTES for start, end in pairwise(ends))


def _pages_within(nbytes: float) -> int:
    """Rounded down to whole pages; at least one."""
    return max(1, int(nbytes) // PAGE_BYTES) * PAGE_BYTES
