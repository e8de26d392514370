"""Which parameters came back without their bytes and were not loaded since: told by their memory, not by their names.

Level 2 drops the weights. What loads them again may leave some out: vLLM's `reload_weights` loads the model, but no
draft model of speculative decoding. So every parameter that comes back without its bytes is marked, which means filled
with one byte before anybody may use it. One that still holds nothing else was not loaded.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from ..backups.ranges import Spans
from ..core.segments import by_device
from ..for_plugin import filling

logger = logging.getLogger("cumem_sleep")

# Small in every float type: what no loader writes, such as padding, may be read. No weight of two bytes or more is so.
MARK, POISON = 0x03, 0xFF
LEAST_BYTES = 2
MOST_NAMES = 5
_HEAD_BYTES, _PIECE_BYTES = 64, 4 << 20  # compared first, of every parameter; and then at a time

_WEIGHTS = "weights"
_AWAKE = _core.Segment.Sleep.AWAKE

_marked: dict[int, int] = {}  # the bytes of parameters by their addresses; those that were seen loaded are left out


@dataclass(frozen=True)
class ParameterPlace:
    """The first piece of a parameter's memory that lies together, which is mostly all of it."""

    name: str
    parameter: Any
    address: int
    bytes: int

    def contents(self) -> Any:
        """Its bytes, as a tensor."""
        import torch

        parameter = self.parameter
        empty = torch.empty(0, dtype=torch.uint8, device=parameter.device)
        offset_bytes = parameter.storage_offset() * parameter.element_size()
        return empty.set_(parameter.untyped_storage(), offset_bytes, (self.bytes,), (1,))


@contextmanager
def marking(worker: Any) -> Iterator[None]:
    """Wakes inside mark the worker's parameters that come back without their bytes. Until then it calls no CUDA."""
    allocator = CuMemAllocator.instance
    if allocator is None or not any(s.sleep != _AWAKE and s.tag == _WEIGHTS for s in _core.segments()):
        yield
        return
    byte = _byte(allocator)

    def mark(lost: Sequence[tuple[_core.Segment, Spans]]) -> None:
        lost = [each for each in lost if each[0].tag == _WEIGHTS]
        if not lost:
            return
        _marked.clear()  # weights sleep all together
        places = sorted((place.address, place.bytes) for place in _places(worker))
        for device in by_device(segment for segment, _ in lost):
            with _core.CopyStream(device) as stream:
                for segment, spans in lost:
                    for begin, end in spans if segment.device == device else ():
                        first = bisect_left(places, (segment.address + begin, 0))
                        last = bisect_left(places, (segment.address + end, 0))
                        for address, nbytes in places[first:last]:
                            lost_bytes = min(nbytes, segment.address + end - address)  # its end may survive
                            stream.fill(address, byte, lost_bytes)
                            _marked[address] = lost_bytes
                stream.synchronize()

    with filling(allocator, mark):
        yield
    if _marked:
        _warn_of_a_run(worker)


def not_loaded(worker: Any) -> str:
    """The parameters that are still as they were marked, in words; "" if there are none, or if weights sleep."""
    allocator = CuMemAllocator.instance
    if not _marked or allocator is None or any(s.sleep != _AWAKE and s.tag == _WEIGHTS for s in _core.segments()):
        return ""
    byte = _byte(allocator)
    marked = [
        replace(place, bytes=_marked[place.address])
        for place in _places(worker)
        if LEAST_BYTES <= _marked.get(place.address, 0) <= place.bytes
    ]
    left = {place.address: place for place in _beginning_with(byte, marked) if _holds_only(byte, place.contents())}
    for place in marked:  # others are out of the model while vLLM loads it, and come back
        if place.address not in left:
            del _marked[place.address]
    names = [place.name for place in left.values()]
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


def _byte(allocator: CuMemAllocator) -> int:
    return POISON if allocator.settings.poison else MARK


def _places(worker: Any) -> list[ParameterPlace]:
    """Of all parameters, of the model and of one that drafts for it."""
    found: dict[int, ParameterPlace] = {}
    for prefix, model in models(worker):
        for name, parameter in named_parameters(model, prefix):
            place = _place(name, parameter)
            if place is not None:
                found.setdefault(place.address, place)  # tied parameters have one
    return list(found.values())


def named_parameters(model: Any, prefix: str) -> list[tuple[str, Any]]:
    """The parameters of one of `models`, tied ones by each of their names: a load may name any."""
    try:
        return [(prefix + name, each) for name, each in model.named_parameters(remove_duplicate=False)]
    except Exception as error:  # a model of an unforeseen kind must sleep and wake all the same
        logger.warning("the parameters of %s cannot be told from its other memory: %s", type(model).__name__, error)
        return []


def models(worker: Any) -> Iterator[tuple[str, Any]]:
    """The worker's model, and the one that drafts for it, in whichever way this vLLM keeps them."""
    runner = getattr(worker, "model_runner", None)
    main = getattr(runner, "model", None)
    if main is None:
        try:
            main = worker.get_model()
        except Exception as error:  # of a worker that has none
            logger.debug("no model: %s", error)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # vLLM's older and newer runner
    for prefix, model in (("", main), ("draft.", getattr(drafter, "model", None))):
        if hasattr(model, "named_parameters"):
            yield prefix, model


def _place(name: str, parameter: Any) -> ParameterPlace | None:
    """None for what has no memory of its own: it is empty, on no device, or wraps other tensors."""
    try:
        address = int(parameter.data_ptr())
    except Exception:
        return None
    elements = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != elements:
            break
        elements *= size
    nbytes = elements * parameter.element_size()
    return ParameterPlace(name, parameter, address, nbytes) if address and nbytes >= LEAST_BYTES else None


def _beginning_with(byte: int, places: list[ParameterPlace]) -> list[ParameterPlace]:
    """Those that begin so, by one look at the device."""
    import torch

    if not places:
        return []
    heads = torch.stack([(place.contents()[:_HEAD_BYTES] == byte).all() for place in places]).tolist()
    return [place for place, is_so in zip(places, heads, strict=True) if is_so]


def _holds_only(byte: int, contents: Any) -> bool:
    return all(bool((piece == byte).all()) for piece in contents.split(_PIECE_BYTES))


def _warn_of_a_run(worker: Any) -> None:
    """Warn once if the model runs before its weights are loaded: its answers would be plausible garbage."""
    run = getattr(worker, "execute_model", None)
    if run is None or hasattr(run, "warns"):
        return
    is_own = "execute_model" in vars(worker)

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        scheduled = [*args, *kwargs.values()][:1]
        if all(getattr(each, "total_num_scheduled_tokens", 1) for each in scheduled):
            if is_own:
                worker.execute_model = run
            else:
                del worker.execute_model  # the class's again
            if names := not_loaded(worker):
                logger.warning(
                    "the model runs on weights that level 2 dropped and nobody loaded since (%s): what it says means"
                    " nothing. Load them first, for instance with collective_rpc('reload_weights')",
                    names,
                )
        return run(*args, **kwargs)

    execute_model.warns = True  # type: ignore[attr-defined]
    worker.execute_model = execute_model
