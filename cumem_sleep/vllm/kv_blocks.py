"""A worker's side of a KV cache that survives a sleep: which bytes the blocks are, and whether they came back.

The engine core asks by `collective_rpc` (`answer`); no answer raises. Block ids are the same in all workers of an
engine; each turns them into ranges of its own memory, by the strides of the tensors that its layers read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..allocator import CuMemAllocator
from ..errors import format_bytes
from ..for_plugin import agreement, drop_kept
from .allocator_calls import AllocatorCall, wrapped
from .droppable import layer_caches
from .kept_kv import refusal, version_misfit

logger = logging.getLogger("cumem_sleep")

_ALIGNMENT = 16  # of the layer's ranges


class Unproven(Exception):
    """It is not certain which bytes a block is."""


@dataclass(frozen=True)
class BlockLayout:
    """Which bytes the blocks are.

    Attributes:
        regions: for each tensor's memory, by its address: (offset, stride) in bytes of regions in which block b is the
            `stride` bytes at offset + b * stride. Together the regions are that memory, and no two share a byte.
    """

    num_blocks: int
    regions: dict[int, list[tuple[int, int]]]

    @property
    def block_bytes(self) -> int:
        """What one block takes, in all tensors."""
        return sum(stride for regions in self.regions.values() for _, stride in regions)

    def ranges(self, blocks: list[int]) -> dict[int, Any]:
        """For each address, the (offset, bytes) of these blocks: an array of shape (n, 2). Neighbours are one range."""
        import numpy as np

        ids = np.unique(np.asarray(blocks, dtype=np.int64))
        heads = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
        first, count = ids[heads], np.diff(np.append(heads, ids.size))
        found = {}
        for address, regions in self.regions.items():
            offset, stride = np.asarray(regions, dtype=np.int64).T[:, :, None]
            found[address] = np.stack([offset + first * stride, count * stride], axis=-1).reshape(-1, 2)
        return found


@dataclass
class _Plan:
    """What the next sleep is to keep, and what became of it."""

    generation: int = 0
    keep: dict[int, Any] = field(default_factory=dict)
    is_due: bool = False  # the sleep is still to come
    slept: Any = None  # the report of the sleep that kept it
    weights: dict[int, str] = field(default_factory=dict)  # their digests then
    wakes: int = 0
    woken_bytes: int = 0
    lost: str = ""


_plan = _Plan()


def answer(worker: Any, question: str, *args: Any) -> dict[str, Any]:
    """One worker's answer to `collective_rpc("cumem_sleep_kept_kv")`: `why` says what is not as it should be."""
    try:
        return {"why": "", **_QUESTIONS[question](worker, *args)}
    except Unproven as error:
        return {"why": str(error)}
    except Exception as error:
        logger.exception("the KV cache cannot be kept")
        return {"why": f"{type(error).__name__}: {error}"}


def _room(worker: Any, budget: int | str) -> dict[str, Any]:
    layout, allocator = layout_of(worker), _allocator()
    room = allocator.kept_room()
    return {"block_bytes": layout.block_bytes, "room": room if budget == "auto" else min(room, int(budget))}


def bytes_to_prepare(worker: Any) -> int:
    """How much the engine core may have a sleep keep, as far as this worker knows: `CuMemAllocator.prepare` pins it."""
    budget = _allocator().settings.keep_kv_bytes
    if not budget or version_misfit():
        return 0
    return int(answer(worker, "room", budget).get("room", 0))


def say_what_auto_keeps(worker: Any) -> None:
    """Log, once for an engine, how much of its KV cache `CUMEM_SLEEP_KEEP_KV_BYTES=auto` keeps, or would keep."""
    allocator = _allocator()
    budget, ranks = allocator.settings.keep_kv_bytes, agreement(allocator)
    if budget not in ("auto", 0) or version_misfit() or (ranks is not None and ranks.mesh.rank):
        return
    try:
        layout = layout_of(worker)
        room = allocator.kept_room()
    except Exception as error:  # no reason for a start to fail
        logger.debug("nobody knows what a sleep could keep of the KV cache: %s", error)
        return
    nbytes = layout.block_bytes * layout.num_blocks
    now = "sleeps keep" if budget else "sleeps clear the KV cache, and would keep"
    text = f"{now} up to {format_bytes(min(room, nbytes))} of {format_bytes(nbytes)} in each worker"
    logger.info("cumem-sleep: %s, with CUMEM_SLEEP_KEEP_KV_BYTES=auto", text)


def _take_plan(worker: Any, generation: int, blocks: list[int]) -> dict[str, Any]:
    global _plan
    _plan = _Plan(generation)  # also if the next line raises
    _plan.keep, _plan.is_due = layout_of(worker).ranges(blocks), True
    return {}


def _kept(_: Any, generation: int) -> dict[str, Any]:
    """Whether the sleep, which has just ended, kept all; `slept`: whether memory slept at all, also if a driver did not
    let it come back.
    """
    found = _kept_still(generation)
    if not found["why"] and _allocator().settings.verify == "wake":
        _plan.weights = _allocator().digests("weights")
    return found


def _kept_still(generation: int) -> dict[str, Any]:
    plan, slept = _plan, _plan.slept
    if plan.generation != generation or plan.is_due or slept is None:
        is_asleep = any(usage.asleep_segments for usage in _allocator().usage().values())
        return {"why": "the sleep did not come to it", "slept": is_asleep or plan.generation != generation}
    return {"why": plan.lost or slept.not_kept, "slept": True, "bytes": slept.kept_bytes}


def _whole(_: Any, generation: int) -> dict[str, Any]:
    """Whether all that the sleep kept is back."""
    why = _kept_still(generation)["why"]
    if not why and _plan.woken_bytes != _plan.slept.kept_bytes:
        why = f"{_plan.woken_bytes} of {_plan.slept.kept_bytes} bytes came back"
    # A single wake has proven the weights; between several of them, somebody could write.
    if not why and _plan.wakes > 1 and _plan.weights and _plan.weights != _allocator().digests("weights"):
        why = "the weights are not those that it was computed with"
    return {"why": why}


def _drop(_: Any) -> dict[str, Any]:
    global _plan
    _plan = _Plan()
    if CuMemAllocator.instance is not None:
        drop_kept(_allocator())
    return {}


_QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "room": _room,
    "plan": _take_plan,
    "kept": _kept,
    "whole": _whole,
    "drop": _drop,
}


@contextmanager
def keeping() -> Iterator[None]:
    """A sleep inside keeps what is planned. vLLM's worker calls the allocator itself, and knows nothing of it."""
    if not _plan.is_due:
        yield
        return
    plan = _plan

    def keeping(own: AllocatorCall) -> AllocatorCall:
        def sleep(*args: Any, **kwargs: Any) -> Any:
            plan.slept = own(*args, **kwargs, keep=plan.keep)
            return plan.slept

        return sleep

    try:
        with wrapped("sleep", keeping):
            yield
    finally:
        plan.is_due, plan.keep = False, {}


@contextmanager
def restoring() -> Iterator[None]:
    """Wakes inside are noted, also those of a worker's wake that fails later."""
    if _plan.slept is None:
        yield
        return
    plan = _plan

    def noting(own: AllocatorCall) -> AllocatorCall:
        def wake_up(*args: Any, **kwargs: Any) -> Any:
            report = own(*args, **kwargs)
            plan.wakes += 1
            plan.woken_bytes += report.kept_bytes
            plan.lost = plan.lost or report.not_kept
            return report

        return wake_up

    with wrapped("wake_up", noting):
        yield


def _allocator() -> Any:
    return CuMemAllocator.get_instance()


# Layouts


def layout_of(worker: Any) -> BlockLayout:
    """Which bytes the worker's blocks are.

    Raises:
        Unproven: that is not certain.
    """
    runner, config = worker.model_runner, worker.vllm_config
    caches, num_blocks = runner.kv_cache_config, runner.kv_cache_config.num_blocks
    if why := refusal(config, caches):
        raise Unproven(why)
    _refuse_what_wakes_empty(runner, config)
    layers = layer_caches(worker)
    sizes: dict[int, int] = {}
    regions: dict[int, set[tuple[int, int]]] = {}
    for name in (name for group in caches.kv_cache_groups for name in group.layer_names):
        view: Any = layers.get(name)
        if not hasattr(view, "untyped_storage") or not view.numel():
            raise Unproven(f"the KV cache of {name} is no tensor")
        storage = view.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        regions.setdefault(storage.data_ptr(), set()).update(_regions(name, view, storage.nbytes(), num_blocks))
    for address, of_address in regions.items():
        _check_that_they_tile(sorted(of_address), num_blocks, sizes[address])
    if sum(sizes.values()) != _configured_bytes(caches.kv_cache_tensors):
        raise Unproven("some of the KV cache belongs to no layer")
    return BlockLayout(num_blocks, {address: sorted(of_address) for address, of_address in regions.items()})


def _refuse_what_wakes_empty(runner: Any, config: Any) -> None:
    """The older runner of vLLM 0.26 zeroes a quantized KV cache after each wake."""
    quantized = str(getattr(config.cache_config, "cache_dtype", "auto"))
    if hasattr(runner, "init_fp8_kv_scales") and quantized not in ("auto", "float16", "bfloat16", "float32"):
        raise Unproven(f"this vLLM clears a KV cache of {quantized} when it wakes")


def _regions(name: str, view: Any, storage_bytes: int, num_blocks: int) -> list[tuple[int, int]]:
    """Of the layer's view: where the blocks are, one after the other; of each block several places if K and V, or
    heads, are apart.
    """
    element = view.element_size()
    dimensions = [d for d in range(view.dim()) if view.shape[d] >= num_blocks and view.shape[d] % num_blocks == 0]
    if len(dimensions) != 1:
        raise Unproven(f"the KV cache of {name} has shape {tuple(view.shape)}, and there are {num_blocks} blocks")
    blocks = dimensions[0]
    stride = view.stride(blocks) * element * (view.shape[blocks] // num_blocks)
    if stride * num_blocks == storage_bytes:  # all of a block lies together, with that of other layers
        return [(0, stride)]
    outer = [d for d in range(view.dim()) if d != blocks and view.shape[d] > 1 and view.stride(d) > view.stride(blocks)]
    places = itertools.product(*(range(view.shape[d]) for d in outer))
    begin = view.storage_offset()
    return [
        ((begin + sum(i * view.stride(d) for i, d in zip(place, outer, strict=True))) * element, stride)
        for place in places
    ]


def _check_that_they_tile(regions: list[tuple[int, int]], num_blocks: int, nbytes: int) -> None:
    end = 0
    for offset, stride in regions:
        if offset != end:
            break
        end += num_blocks * stride
    if end != nbytes or any(each % _ALIGNMENT for region in regions for each in region):
        raise Unproven(f"blocks do not tile {nbytes} bytes of the KV cache: {regions[:4]}")


def _configured_bytes(tensors: list[Any]) -> int:
    """What the tensors of the KV cache take together; packed ones lie in one."""
    packed: set[int] = {each.size for each in tensors if each.block_stride > 0}
    apart: list[int] = [each.size for each in tensors if not each.block_stride]
    return sum(packed) + sum(apart)
