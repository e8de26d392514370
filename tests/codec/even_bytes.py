"""A second codec, so that tests show what the first one alone cannot: that nothing relies on how chunks are coded.

Where every odd byte of a chunk is the code's, only the even ones are stored, after a header; other chunks are stored as
they are. Small numbers in 16 bits are such content. It has no kernels for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cumem_sleep.codec.codec import CHUNK_BYTES, Bytes, Code, Integers

HEADER_BYTES = 16


@dataclass(frozen=True)
class Layout:
    name: str
    header_bytes: int
    smallest_chunk_bytes: int


LAYOUTS = (Layout("even_bytes", HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES // 2),)


def rank(_: Layout, samples: Bytes) -> tuple[Bytes, npt.NDArray[np.float64]]:
    odd = samples[:, 1::2]
    return odd[:, :1], np.where((odd == odd[:, :1]).all(axis=1), 0.5, 1.0)


def chunk_bytes(code: Code, content: Bytes) -> Integers:
    return np.array([_encoded(code, chunk).size for chunk in content.reshape(-1, CHUNK_BYTES)], np.int64)


def encode(code: Code, content: Bytes) -> Bytes:
    chunks = [_encoded(code, chunk) for chunk in content.reshape(-1, CHUNK_BYTES)]
    return np.concatenate([*chunks, np.zeros(0, np.uint8)])


def decode(code: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
    lengths = np.asarray(sizes, np.int64)
    content = np.zeros((lengths.size, CHUNK_BYTES), np.uint8)
    for chunk, end, length in zip(content, np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
        encoded = stored[end - length : end]
        kept = encoded[HEADER_BYTES:]
        if encoded[:1].any():
            chunk[1::2] = code.parameters[0]
            chunk[::2][: kept.size] = kept[: CHUNK_BYTES // 2]
        else:
            chunk[: kept.size] = kept[:CHUNK_BYTES]
    return content.reshape(-1)


def _encoded(code: Code, chunk: Bytes) -> Bytes:
    is_short = bool((chunk[1::2] == code.parameters[0]).all())
    header = np.zeros(HEADER_BYTES, np.uint8)
    header[0] = is_short
    return np.concatenate([header, chunk[::2] if is_short else chunk])
