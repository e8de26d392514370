"""Which codecs there are, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import exponent
from .codec import CHUNK_BYTES, Bytes, Code, Codec, Kernels, Layout


class Listed(NamedTuple):
    """A codec, and how to import its kernels, which need PyTorch and Triton."""

    codec: Codec[Any, Any]
    import_kernels: Callable[[], Kernels[Any]]


def _exponent_kernels() -> Kernels[Any]:
    from . import exponent_kernel

    return exponent_kernel


CODECS = (Listed(exponent, _exponent_kernels),)


def codec_of(layout: Layout) -> Codec[Any, Any]:
    """The codec that has this layout."""
    return next(listed.codec for listed in CODECS if layout in listed.codec.LAYOUTS)


def all_layouts() -> list[Layout]:
    """Those of all codecs."""
    return [layout for listed in CODECS for layout in listed.codec.LAYOUTS]


def usual_layouts() -> list[Layout]:
    """The first layout of each codec, whose kernels are made ready before the first sleep."""
    return [listed.codec.LAYOUTS[0] for listed in CODECS]


def choose_codes(samples: Bytes, worth: float, without: Collection[Layout] = ()) -> list[Code | None]:
    """The code that makes each sample smallest, of all codecs.

    Args:
        samples: of shape (segments, bytes); each a multiple of 4 bytes from one segment.
        worth: None is chosen where no code is expected to get below this share of the size.
        without: layouts that are left out.
    """
    if not samples.size:
        return [None] * len(samples)
    samples = np.ascontiguousarray(samples)
    best = np.full(len(samples), worth)
    chosen: list[Code | None] = [None] * len(samples)
    for codec, _ in CODECS:
        for layout in (each for each in codec.LAYOUTS if each not in without):
            parameters, ratios = codec.rank(layout, samples)
            better = np.flatnonzero(ratios < best)
            best[better] = ratios[better]
            for segment, mine in zip(better.tolist(), parameters[better].astype(np.uint8), strict=True):
                chosen[segment] = codec.code_of(layout, mine.tobytes())
    return chosen


def least_bytes(content_bytes: int) -> int:
    """The least that any code can make of this much content, which is whole chunks."""
    return content_bytes // CHUNK_BYTES * min(layout.smallest_chunk_bytes for layout in all_layouts())


def decode(code: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
    """By the reference: the content of encoded chunks of these sizes, which lie in `stored` one after another."""
    return codec_of(code.layout).decode(code, stored, sizes)
