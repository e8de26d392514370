"""What of a worker's memory is written again after a sleep, so that the sleep may drop it; all else comes back.

At level 1 that is the storages of the KV cache's tensors, at level 2 also those of parameters that a load writes. What
lies beside them in memory of the same tags (buffers, plain attributes, adapters, the runner's and the sampler's state)
does not count, and where it cannot be told apart, it is kept.
"""

from __future__ import annotations

import fnmatch
import importlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..backups.ranges import Spans, covers
from ..core.levels import DEFERRABLE_TAGS, in_pools
from ..errors import OutOfHostMemory, format_bytes
from ..for_plugin import vote_of_ranks
from . import loaded
from .allocator_calls import AllocatorCall, wrapped

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_LOADER = "vllm.model_executor.model_loader.base_loader"

Drop = dict[int, list[tuple[int, int]]]  # as `CuMemAllocator.sleep` takes it

WRITTEN = "_cumem_sleep_written"  # a model's attribute: the parameters that `load_weights` said that it has written


def at_level(worker: Any, level: int) -> Drop:
    """What a sleep of the worker at this level may drop."""
    storages = kv_storages(worker)
    if level == 2:
        storages.update(_parameter_storages(worker))
    return _in_memory_of((KV_CACHE, WEIGHTS) if level == 2 else (KV_CACHE,), storages)


def by_forgetting(worker: Any) -> Drop:
    """What need not come back once the backups of a sleep at level 1 are forgotten. Of parameters that are to be
    preserved vLLM has made no copies at that level.
    """
    config = getattr(getattr(worker, "vllm_config", None), "model_config", None)
    preserved = getattr(config, "sleep_preserve_parameter_names", None) or ()
    return _in_memory_of((KV_CACHE, WEIGHTS), {**kv_storages(worker), **_parameter_storages(worker, preserved)})


def _in_memory_of(tags: Iterable[str], storages: Mapping[int, int]) -> Drop:
    """The storages that lie in memory of this layer. Each segment of these tags is named: nothing else of it may go."""
    segments = sorted(in_pools()(), key=lambda segment: segment.address)
    starts = [segment.address for segment in segments]
    drop: Drop = {segment.address: [] for segment in segments if segment.tag in tags}
    for address, nbytes in storages.items():
        place = bisect_right(starts, address) - 1
        if place >= 0 and address + nbytes <= starts[place] + segments[place].bytes:
            drop.setdefault(starts[place], []).append((address - starts[place], nbytes))
    return drop


# The KV cache


def layer_caches(worker: Any) -> dict[str, Any]:
    """What each layer has for its KV cache, by its name: a tensor, or several, or nothing."""
    config = getattr(getattr(worker, "vllm_config", None), "compilation_config", None)
    layers = getattr(config, "static_forward_context", None) or {}
    return {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}


def kv_storages(worker: Any) -> dict[int, int]:
    """The memory of all tensors of the KV cache: bytes by address. It may be the host's."""
    runner = getattr(worker, "model_runner", None)
    runners_own = getattr(runner, "kv_caches", None), getattr(runner, "cross_layers_kv_cache", None)
    return dict(filter(None, map(_storage, _tensors([layer_caches(worker), runners_own]))))


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in it, however it is nested."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _storage(tensor: Any) -> tuple[int, int] | None:
    """The address and the bytes of the memory that it is a view of; None: it wraps other tensors, or has no memory."""
    try:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except Exception:
        return None
    return (address, nbytes) if address and nbytes else None


# Parameters


def _parameter_storages(worker: Any, preserved: Iterable[str] = ()) -> dict[int, int]:
    """The storages all of which parameters cover that a load writes: bytes by address.

    Args:
        preserved: patterns of the names of parameters that are not to be dropped.
    """
    sizes: dict[int, int] = {}
    covered: dict[int, Spans] = {}
    for prefix, model in loaded.models(worker):
        written: set[str] | None = getattr(model, WRITTEN, None)
        for name, parameter in loaded.named_parameters(model, prefix):
            if written is not None and name.removeprefix(prefix) not in written:
                continue
            if any(fnmatch.fnmatch(name, pattern) for pattern in preserved):
                continue
            if (found := span(parameter)) is not None:
                address, nbytes, piece = found
                sizes[address] = nbytes
                covered.setdefault(address, []).append(piece)
    return {address: nbytes for address, nbytes in sizes.items() if covers(covered[address], nbytes)}


def span(parameter: Any) -> tuple[int, int, tuple[int, int]] | None:
    """Its storage's address and bytes, and where in it the parameter lies; None if it has gaps, or no storage."""
    storage = _storage(parameter)
    if storage is None:
        return None
    elements = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != elements:
            return None
        elements *= size
    begin = parameter.storage_offset() * parameter.element_size()
    return *storage, (begin, begin + elements * parameter.element_size())


@contextmanager
def noting_what_is_written() -> Iterator[None]:
    """Inside, models are loaded for the first time. What their `load_weights` returns is noted: parameters that are not
    among it no load writes.
    """
    try:
        loader = importlib.import_module(_LOADER)
        make = getattr(loader, "initialize_model")  # noqa: B009 - mypy knows no such name
    except (ImportError, AttributeError):
        yield
        return
    noted: list[Any] = []

    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        if callable(load := getattr(model, "load_weights", None)):
            model.load_weights = _noting(model, load)
            noted.append(model)
        return model

    vars(loader)["initialize_model"] = initialize_model
    try:
        yield
    finally:
        vars(loader)["initialize_model"] = make
        for model in noted:
            model.__dict__.pop("load_weights", None)


def _noting(model: Any, load: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        written = load(*args, **kwargs)
        if isinstance(written, set):
            setattr(model, WRITTEN, getattr(model, WRITTEN, set()) | written)
        return written

    return load_weights


# Sleeping


@contextmanager
def declared(worker: Any, level: int) -> Iterator[None]:
    """Sleeps inside are at this level and drop what they may, and no more; so do discards.

    vLLM's worker calls the allocator itself. It names the tags to back up, of which every version has others, and knows
    nothing of what else lies in memory of the tags that it drops.
    """
    if CuMemAllocator.instance is None or not _core.segments():
        yield
        return
    with vote_of_ranks(CuMemAllocator.get_instance(), "sleep"):  # if this fails, the other ranks hear of it
        drop = at_level(worker, level)

    def sleeping(own: AllocatorCall) -> AllocatorCall:
        def sleep(*_: Any, keep: Any = None, **__: Any) -> Any:
            try:
                return own(level, keep=keep, drop=drop)
            except OutOfHostMemory as error:
                if level == 2 and not error.detail and (largest := _largest_kept(worker, drop)):
                    raise OutOfHostMemory(error.needed_bytes, error.available_bytes, error.limit, largest) from None
                raise

        return sleep

    def discarding(own: AllocatorCall) -> AllocatorCall:
        return lambda tags: own(tags, drop=drop)

    with wrapped("sleep", sleeping), wrapped("discard", discarding):
        yield


def forget(worker: Any, tags: Any = None) -> int:
    """`CuMemAllocator.release_backups`, which checks `tags`; None: of `weights` and `kv_cache`."""
    allocator = CuMemAllocator.get_instance()
    with vote_of_ranks(allocator, "release_backups"):
        drop = by_forgetting(worker)
    return allocator.release_backups(DEFERRABLE_TAGS if tags is None else tags, drop=drop)


def _largest_kept(worker: Any, drop: Drop) -> str:
    """The largest tensors of the models that level 2 backs up because no load is known to write them, in words."""
    names: dict[int, str] = {}
    storages: dict[int, int] = {}
    for prefix, model in loaded.models(worker):
        for path, module in getattr(model, "named_modules", lambda: [])():
            own = {**vars(module), **dict(module.named_parameters("", False)), **dict(module.named_buffers("", False))}
            for name, value in own.items():
                for address, nbytes in filter(None, map(_storage, _tensors(value))):
                    if name not in ("_parameters", "_buffers"):
                        names.setdefault(address, f"{prefix}{path}.{name}".lstrip("."))
                        storages[address] = nbytes
    sizes: Counter[str] = Counter()
    for segment, ranges in _in_memory_of((), storages).items():
        for offset, nbytes in ranges:
            if (offset, nbytes) not in drop.get(segment, ()):
                sizes[names[segment + offset]] += nbytes
    if not sizes:
        return ""
    named = ", ".join(f"{name} ({format_bytes(nbytes)})" for name, nbytes in sizes.most_common(loaded.MOST_NAMES))
    return f"no load is known to write these again: {named}"
