"""The segments that the benchmark works on: as requested, or as much as fits; checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from ... import _core
from ...errors import InvalidArgument, InvalidState, format_bytes
from ...settings import Settings
from ..layout import PAGE_BYTES, lay_out, whole_pages
from ..safetensors import read_tensors
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
MODEL_KV_BYTES = int(54.63 * (1 << 30)) // PAGE_BYTES * PAGE_BYTES  # as vLLM 0.26 chose it on an H200
LEAST_MODEL_BYTES = -(-_MODEL_PAGES // _EMBEDDING_PAGES) * PAGE_BYTES  # so that every segment has a page


# Kept free: on the GPU for PyTorch's kernels and for checking, on the host for the interpreter and PyTorch.
_DEVICE_RESERVE_BYTES, _HOST_RESERVE_BYTES = 1 << 30, 2 << 30
_SIMULATED_HOST_RESERVE_BYTES = 256 << 20
_PINNED_PER_DEVICE_BYTE = 512  # the driver takes 2 MiB of the GPU for each GiB of pinned memory (measured, 580)


@dataclass(frozen=True)
class Request:
    """What the user requested; None: `plan` decides.

    Attributes:
        weights_bytes, kv_bytes: total sizes.
        segment_bytes: the size of every segment of the weights.
        models: safetensors files, or folders of them, with the tensors of the weights.
    """

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    segment_bytes: int | None = None
    models: tuple[Path, ...] = ()


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

    @property
    def weights_bytes(self) -> int:
        """The total size of the weights."""
        return sum(self.weights)

    @property
    def kv_bytes(self) -> int:
        """The total size of the KV cache."""
        return sum(self.kv_cache)


@dataclass(slots=True)
class SimulatedSizes:
    """What is chosen on the simulated driver. Nobody has to set it; tests make it small.

    Attributes:
        link_bytes: copied at a time to measure the link.
    """

    weights_bytes: int = 256 << 20
    kv_bytes: int = 128 << 20
    link_bytes: int = 64 << 20


SIMULATED = SimulatedSizes()


@dataclass(frozen=True)
class Room:
    """How much room there is.

    Attributes:
        device_bytes: free on the GPU, less a reserve.
        host_bytes: what the tightest limit leaves for backups, less a reserve; None if no limit is known.
        host_limit: which limit that is.
        simulated: the device is host memory too.
    """

    device: int
    device_bytes: int
    host_bytes: int | None
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
        limits = {"budget": settings.host_budget_bytes, **host_memory_left()}
        reserve = _SIMULATED_HOST_RESERVE_BYTES if simulated else _HOST_RESERVE_BYTES
        left = {
            name: max(0, available - (0 if name == "budget" else reserve))
            for name, available in limits.items()
            if available is not None
        }
        tightest = min(left, key=left.__getitem__, default="")
        free_bytes, _ = _core.memory_info(device)
        device_bytes = max(0, free_bytes - (0 if simulated else _DEVICE_RESERVE_BYTES))
        return cls(device, device_bytes, left.get(tightest), tightest, simulated)

    def holds(self, weights_bytes: int, kv_bytes: int) -> bool:
        """Whether both fit, together with the backups of the weights."""
        return weights_bytes <= self.weights_that_fit(kv_bytes)

    def weights_that_fit(self, kv_bytes: int) -> int:
        """The largest weights beside this KV cache, in whole pages; 0 if not even the KV cache fits."""
        on_device = self.device_bytes - kv_bytes
        if not self.simulated:
            on_device -= on_device // (_PINNED_PER_DEVICE_BYTE + 1)
        most = on_device
        if self.host_bytes is not None:
            most = min(most, (self.host_bytes - kv_bytes) // 2 if self.simulated else self.host_bytes)
        return _pages_within(most)

    def kv_that_fits(self, weights_bytes: int) -> int:
        """The largest KV cache beside these weights, in whole pages; 0 if not even the weights fit."""
        if not self.holds(weights_bytes, 0):
            return 0
        pinned = 0 if self.simulated else weights_bytes // _PINNED_PER_DEVICE_BYTE
        most = self.device_bytes - weights_bytes - pinned
        if self.simulated and self.host_bytes is not None:
            most = min(most, self.host_bytes - 2 * weights_bytes)
        return _pages_within(most)

    def __str__(self) -> str:
        host = "" if self.host_bytes is None else f", {format_bytes(self.host_bytes)} on the host ({self.host_limit})"
        return f"device {self.device} has room for {format_bytes(self.device_bytes)}{host}"


def plan(request: Request, room: Room) -> Workload:
    """The segments as requested, or as much as fits.

    Raises:
        InvalidArgument: sizes do not fit, or options contradict each other; the message says what would work.
        InvalidState: there is no room at all.
        SafetensorsError: a file of the model cannot be read.
    """
    if request.models:
        for option, value in (("--weights", request.weights_bytes), ("--segment-size", request.segment_bytes)):
            if value is not None:
                raise InvalidArgument(f"{option} {format_bytes(value)} beside --model: the model determines the sizes")
        name, weights = _of_model(request.models)
        kv_bytes, why = _chosen_kv(request, room, sum(weights))
    else:
        weights_bytes, kv_bytes, why = _totals(request, room)
        if request.segment_bytes is None:
            name, weights = "Qwen3-32B-like", model_like(weights_bytes)
        else:
            name = f"equal segments of {format_bytes(request.segment_bytes)}"
            weights = equal_segments(weights_bytes, request.segment_bytes)
    workload = Workload(name, weights, kv_segments(kv_bytes), why)
    _check(workload, room)
    return workload


def model_like(nbytes: int) -> tuple[int, ...]:
    """The 258 segments of a Qwen3-32B, scaled to `nbytes` and rounded down to pages; small sizes have fewer layers.

    Raises:
        InvalidArgument: too small for a single layer.
    """
    if nbytes < LEAST_MODEL_BYTES:
        raise InvalidArgument(
            f"--weights {format_bytes(nbytes)}: a model takes at least {format_bytes(LEAST_MODEL_BYTES)};"
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


def _of_model(models: Sequence[Path]) -> tuple[str, tuple[int, ...]]:
    """The segments into which PyTorch would put the tensors of a model. Only headers are read."""
    segments = lay_out(read_tensors(models))
    name = models[0].resolve().name + (f" and {len(models) - 1} more" if len(models) > 1 else "")
    return name, tuple(whole_pages(segment.nbytes) for segment in segments)


def _totals(request: Request, room: Room) -> tuple[int, int, str]:
    """The bytes of weights and KV cache, and how sizes that were not requested were chosen."""
    wished_weights, wished_kv, model = MODEL_WEIGHTS_BYTES, MODEL_KV_BYTES, "a Qwen3-32B beside vLLM on an H200"
    if room.simulated:
        wished_weights, wished_kv, model = SIMULATED.weights_bytes, SIMULATED.kv_bytes, "a small simulated model"
    if request.weights_bytes is not None:
        return (request.weights_bytes, *_chosen_kv(request, room, request.weights_bytes))
    if request.kv_bytes is not None:
        weights_bytes = min(wished_weights, room.weights_that_fit(request.kv_bytes))
    else:
        # A GPU that is too small is divided in the model's proportions; the host may limit the weights even further.
        share = room.device_bytes * wished_weights // (wished_weights + wished_kv)
        weights_bytes = min(wished_weights, _pages_within(share), room.weights_that_fit(0))
    if weights_bytes < (LEAST_MODEL_BYTES if request.segment_bytes is None else request.segment_bytes):
        raise InvalidState(
            f"no room for a model: {room}; free some memory, raise the limit, or choose --weights and --kv"
        )
    kv_bytes, _ = _chosen_kv(request, room, weights_bytes, wished_kv)
    if weights_bytes == wished_weights and kv_bytes in (wished_kv, request.kv_bytes):
        return weights_bytes, kv_bytes, f"the sizes of {model}, which fit: {room}"
    return weights_bytes, kv_bytes, f"what fits of {model}: {room}"


def _chosen_kv(request: Request, room: Room, weights_bytes: int, wished: int | None = None) -> tuple[int, str]:
    """The KV cache as requested, or as much of the wished one as fits, at least a page; and how it was chosen."""
    if request.kv_bytes is not None:
        return request.kv_bytes, ""
    if wished is None:
        wished = SIMULATED.kv_bytes if room.simulated else MODEL_KV_BYTES
    chosen = max(PAGE_BYTES, min(wished, room.kv_that_fits(weights_bytes)))
    return chosen, f"a KV cache of {format_bytes(chosen)} was chosen: {room}"


def _check(workload: Workload, room: Room) -> None:
    weights_bytes, kv_bytes = workload.weights_bytes, workload.kv_bytes
    if room.holds(weights_bytes, kv_bytes):
        return
    what = f"weights of {format_bytes(weights_bytes)} and --kv {format_bytes(kv_bytes)} do not fit: {room}"
    advice = []
    if weights_that_fit := max(0, room.weights_that_fit(kv_bytes)):
        advice.append(f"--weights {format_bytes(weights_that_fit)} with this --kv")
    if kv_that_fits := room.kv_that_fits(weights_bytes):
        advice.append(f"--kv {format_bytes(kv_that_fits)} with these weights")
    if not advice and (weights_that_fit := room.weights_that_fit(PAGE_BYTES)):
        advice.append(f"--weights {format_bytes(weights_that_fit)} with hardly any --kv")
    raise InvalidArgument(f"{what}; what would fit: {', or '.join(advice) or 'nothing'}")


def _spread(pages: int, shares: Sequence[int]) -> tuple[int, ...]:
    """`pages` divided in proportion to `shares`: sizes in bytes, in whole pages, which add up to `pages`."""
    total = sum(shares)
    ends = [pages * end // total for end in accumulate(shares, initial=0)]
    return tuple((end - start) * PAGE_BYTES for start, end in pairwise(ends))


def _pages_within(nbytes: int) -> int:
    """Rounded down to whole pages; at least 0."""
    return max(0, nbytes // PAGE_BYTES * PAGE_BYTES)
