"""Which codecs there are, and what is asked of all of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import cache
from importlib import import_module
from typing import cast

import numpy as np
import numpy.typing as npt

from .. import _core
from ..core import log
from ..errors import CodecError
from . import exponent
from .codec import CHUNK_BYTES, Bytes, Code, Codec, Kernels, Layout
from .kernels import SimulatedKernels, codec_errors, try_kernels

CODECS: tuple[Codec, ...] = (exponent,)  # the kernels of each are in the module of that name with `_kernel` after it


def codec_of(layout: Layout) -> Codec:
    """The codec that has this layout."""
    return next(codec for codec in CODECS if layout in codec.LAYOUTS)


def kernels_of(layout: Layout) -> Kernels:
    """The kernels for this layout; on the simulated driver, what takes their place.

    Raises:
        ImportError: PyTorch or Triton is missing.
    """
    codec = codec_of(layout)
    if _core.driver_is_simulated():
        return SimulatedKernels(codec)
    return cast(Kernels, import_module(f"{codec.__name__}_kernel"))


@cache
def require_kernels() -> None:
    """Import the kernels of all codecs.

    Raises:
        CodecError: PyTorch or Triton is missing, or does not reach the GPU.
    """
    with codec_errors():
        for layout in all_layouts():
            kernels_of(layout)
        if not _core.driver_is_simulated() and not import_module("torch").cuda.is_available():
            raise CodecError("PyTorch does not reach the GPU")


def make_ready(ready: set[tuple[Layout, int]], layout: Layout, device: int) -> None:
    """Compile, load and test kernels, unless `ready` has them, before anything is stored that only they can read.

    Raises:
        CodecError: they fail, or give wrong results.
    """
    if (layout, device) in ready:
        return
    if not _core.device_info(device).host_pointers:
        raise CodecError(f"kernels of device {device} cannot access pinned host memory by its host address")
    begin = time.perf_counter()
    with codec_errors():
        try_kernels(codec_of(layout), kernels_of(layout), layout, device)
    ready.add((layout, device))
    seconds = time.perf_counter() - begin
    log.debug("the kernels for %s are ready on device %d after %.2f s", layout.name, device, seconds)


def all_layouts() -> list[Layout]:
    """Those of all codecs."""
    return [layout for codec in CODECS for layout in codec.LAYOUTS]


def usual_layouts() -> list[Layout]:
    """The first layout of each codec, whose kernels are made ready before the first sleep."""
    return [codec.LAYOUTS[0] for codec in CODECS]


def choose_codes(samples: Bytes, worth: float, without: Collection[Layout] = ()) -> list[Code | None]:
    """The code that makes each sample smallest, of all codecs.

    Args:
        samples: of shape (segments, bytes); each a multiple of 4 bytes from one segment.
        worth: None is chosen where no code is expected to get below this share of the size.
        without: layouts that are left out.
    """
    best = np.full(len(samples), worth)
    chosen: list[Code | None] = [None] * len(samples)
    for codec in CODECS if samples.size else ():
        for layout in (each for each in codec.LAYOUTS if each not in without):
            parameters, ratios = codec.rank(layout, np.ascontiguousarray(samples))
            better = np.flatnonzero(ratios < best)
            best[better] = ratios[better]
            for segment, mine in zip(better.tolist(), parameters[better].astype(np.uint8), strict=True):
                chosen[segment] = Code(layout, mine.tobytes())
    return chosen


def least_bytes(content_bytes: int) -> int:
    """The least that any code can make of this much content, which is whole chunks."""
    return content_bytes // CHUNK_BYTES * min(layout.smallest_chunk_bytes for layout in all_layouts())


def decode(code: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
    """By the reference: the content of encoded chunks of these sizes, which lie in `stored` one after another."""
    return codec_of(code.layout).decode(code, stored, sizes)
