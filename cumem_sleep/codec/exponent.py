"""A lossless code for model weights: exponents are coded by frequency, signs and mantissas are stored as they are.

Trained weights are close to normally distributed, so their exponents carry about 2.6 bits, whatever the type; signs and
mantissas are noise. Content is cut into chunks of `CHUNK_BYTES`, which are independent, and those into blocks of
`BLOCK_VALUES` values, so that a GPU decodes many at once. A value is a little-endian unsigned number, rotated left by
one bit: then its highest bits are the exponent (the symbol), and the rest, with the sign lowest, are raw bits.

A symbol is coded by its place among the nine most frequent ones of its segment, in a cascade of three levels of two
bits: level 0 says place 0, 1, 2, or "passed on"; for those passed on, in order, level 1 says place 3, 4, 5, or passed
on; for those passed on again, level 2 says place 6, 7, 8, or passed on; for the rest the symbol itself follows. On
exponents of normal values this is within 1 % of their entropy, and it decodes without tables or a serial walk.

A block, padded to a multiple of 16 bytes, where level k passes on n_k values:

    planes of raw bits | level 0, 1024 bytes | level 1, ceil(n_0 / 16) words | level 2, ceil(n_1 / 16) words | n_2 bytes

A field of w bits of value i lies in byte i * w // 8 of its plane or level, at bit i * w % 8. A chunk is a header (for
each block a u32: where it starts in the chunk, a multiple of 16) and the blocks, in any order, without gaps: so counts
of symbols give the exact size beforehand. Everything is little-endian.

Decoders are safe with any bytes: offsets are rounded to multiples of 16, and everything outside of the chunk's encoded
bytes (and any last, incomplete 16 of them) reads as zero. Digests detect damage, decoders do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .codec import CHUNK_BYTES, Bytes, Code, Integers

BLOCK_VALUES = 4096

LEVELS = 3
PLACES = 3 * LEVELS  # symbols that have a code; `PLACES` itself stands for all others
ALIGN_BYTES = 16
LEVEL_0_BYTES = BLOCK_VALUES // 4
PASSED_ON = 3
CODES_PER_WORD = 16

Values = npt.NDArray[np.integer[Any]]
_Size = TypeVar("_Size", int, Integers)


@dataclass(frozen=True)
class ExponentLayout:
    """How a value is split: the highest `symbol_bits` after the rotation, and raw bits in planes, the lowest first.

    A plane has 8, 4, 2 or 1 bits of each value.
    """

    name: str
    value_bytes: int
    symbol_bits: int
    planes: tuple[int, ...]

    @property
    def value_bits(self) -> int:
        """The width of a value."""
        return 8 * self.value_bytes

    @property
    def raw_bits(self) -> int:
        """How many bits of a value are stored as they are."""
        return sum(self.planes)

    @property
    def placed_planes(self) -> tuple[tuple[int, int], ...]:
        """The width of each plane, and which bit of a value is its lowest."""
        return tuple((width, sum(self.planes[:plane])) for plane, width in enumerate(self.planes))

    @property
    def blocks_per_chunk(self) -> int:
        """How many blocks of `BLOCK_VALUES` values a chunk has."""
        return CHUNK_BYTES // (BLOCK_VALUES * self.value_bytes)

    @property
    def header_bytes(self) -> int:
        """The size of a chunk's header, which says where each of its blocks starts."""
        return _aligned(4 * self.blocks_per_chunk)

    @property
    def fixed_bytes(self) -> int:
        """The size of what every block has: the planes and level 0."""
        return BLOCK_VALUES * self.raw_bits // 8 + LEVEL_0_BYTES

    @property
    def largest_block_bytes(self) -> int:
        """The size of a block in which every symbol is passed on to the end."""
        return self.fixed_bytes + (LEVELS - 1) * LEVEL_0_BYTES + BLOCK_VALUES

    @property
    def smallest_chunk_bytes(self) -> int:
        """The size of an encoded chunk in which no symbol is passed on."""
        return self.header_bytes + self.blocks_per_chunk * self.fixed_bytes

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of the values as numbers."""
        return np.dtype(f"<u{self.value_bytes}")


LAYOUTS = (
    ExponentLayout("bf16", 2, 8, (8,)),
    ExponentLayout("fp16", 2, 5, (8, 2, 1)),
    ExponentLayout("e4m3", 1, 4, (4,)),
    ExponentLayout("e5m2", 1, 5, (2, 1)),
    ExponentLayout("fp32", 4, 8, (8, 8, 8)),
)


def rank(layout: ExponentLayout, samples: Bytes) -> tuple[Integers, npt.NDArray[np.float64]]:
    """The nine most frequent symbols of each sample, and the ratio expected of a code with them."""
    counts = _histograms(layout, samples)
    # With the symbol in the lowest bits, one sort gives the order, which is the same every time for equal counts.
    keys = (counts << layout.symbol_bits) | np.arange(1 << layout.symbol_bits)
    top = np.sort(np.partition(keys, -PLACES, axis=1)[:, -PLACES:], axis=1)[:, ::-1]
    values = samples.shape[1] // layout.value_bytes
    covered = np.cumsum(top >> layout.symbol_bits, axis=1)[:, 2::3] / values
    passed_on = 1 - covered
    bits = layout.raw_bits + 2 + passed_on @ np.array([2, 2, 8])
    return top & ((1 << layout.symbol_bits) - 1), bits / layout.value_bits


def _histograms(layout: ExponentLayout, samples: Bytes) -> Integers:
    """How often each symbol occurs in each sample, of shape (segments, symbols)."""
    # Shifting out the sign leaves the symbol in the highest bits.
    symbols = (samples.view(layout.dtype) << 1) >> (layout.value_bits - layout.symbol_bits)
    numbered = symbols + (np.arange(len(samples)) << layout.symbol_bits)[:, None]
    counts = np.bincount(numbered.reshape(-1), minlength=len(samples) << layout.symbol_bits)
    return counts.reshape(len(samples), -1)


def chunk_bytes(code: Code, content: Bytes) -> Integers:
    """The encoded size of each chunk of `content`, which is a whole number of chunks."""
    layout, places_of = code.layout, _places(code)
    sizes = []
    for chunk in content.reshape(-1, CHUNK_BYTES):
        places = places_of[_rotated(layout, chunk) >> layout.raw_bits].reshape(-1, BLOCK_VALUES)
        *levels, last = (np.count_nonzero(places >= PASSED_ON * (level + 1), axis=1) for level in range(LEVELS))
        blocks = _aligned(layout.fixed_bytes + sum(4 * _word_counts(passed_on) for passed_on in levels) + last)
        sizes.append(layout.header_bytes + int(blocks.sum()))
    return np.array(sizes, np.int64)


def encode(code: Code, content: Bytes) -> Bytes:
    """The encoded chunks of `content` (whole chunks) one after another; `chunk_bytes` gives their sizes."""
    chunks = [_encode_chunk(code, chunk) for chunk in content.reshape(-1, CHUNK_BYTES)]
    return np.concatenate([np.zeros(0, np.uint8), *chunks])


def decode(code: Code, stored: Bytes, sizes: npt.ArrayLike) -> Bytes:
    """The content of encoded chunks of the given sizes, which lie in `stored` one after another."""
    spans = zip(np.cumsum(sizes, dtype=np.int64).tolist(), np.ravel(sizes).tolist(), strict=True)
    chunks = [_decode_chunk(code, stored[end - nbytes : end]) for end, nbytes in spans]
    return np.concatenate([np.zeros(0, np.uint8), *chunks])


def _encode_chunk(code: Code, chunk: Bytes) -> Bytes:
    layout = code.layout
    rotated = _rotated(layout, chunk)
    symbols = (rotated >> layout.raw_bits).astype(np.uint8)
    places = _places(code)[symbols]
    fields = ((rotated >> shift, width) for width, shift in layout.placed_planes)
    planes = [_packed(values.astype(np.uint8) & ((1 << width) - 1), width) for values, width in fields]
    planes.append(_packed(np.minimum(places, PASSED_ON), 2))
    fixed = np.concatenate([plane.reshape(layout.blocks_per_chunk, -1) for plane in planes], axis=1)
    columns = zip(fixed, places.reshape(-1, BLOCK_VALUES), symbols.reshape(-1, BLOCK_VALUES), strict=True)
    blocks = [_encode_block(*each) for each in columns]
    sizes = np.array([block.size for block in blocks])
    header = np.zeros(layout.header_bytes, np.uint8)
    header[: 4 * len(blocks)].view("<u4")[:] = layout.header_bytes + np.cumsum(sizes) - sizes
    return np.concatenate([header, *blocks])


def _encode_block(fixed: Bytes, places: Bytes, symbols: Bytes) -> Bytes:
    parts = [fixed]
    for level in range(1, LEVELS + 1):
        left = np.flatnonzero(places >= PASSED_ON)
        places, symbols = places[left] - np.uint8(PASSED_ON), symbols[left]
        parts.append(_packed(np.minimum(places, PASSED_ON), 2) if level < LEVELS else symbols)
    return _padded(np.concatenate(parts), ALIGN_BYTES)


def _decode_chunk(code: Code, stored: Bytes) -> Bytes:
    layout = code.layout
    limit = stored.size & -ALIGN_BYTES
    # A block starts at the limit at the latest, so it ends within this, and nothing below needs a bounds check.
    padded = np.zeros(limit + max(layout.header_bytes, layout.largest_block_bytes), np.uint8)
    padded[:limit] = stored[:limit]
    starts = np.minimum(padded[: 4 * layout.blocks_per_chunk].view("<u4").astype(np.int64) & -ALIGN_BYTES, limit)

    fixed = padded.view("<u8")[starts[:, None] // 8 + np.arange(layout.fixed_bytes // 8)].view(np.uint8)
    rotated = np.zeros(len(fixed) * BLOCK_VALUES, layout.dtype)
    for width, shift in layout.placed_planes:
        plane = fixed[:, BLOCK_VALUES * shift // 8 : BLOCK_VALUES * (shift + width) // 8]
        rotated |= _unpacked(plane, width).reshape(-1).astype(layout.dtype) << shift

    codes = [_unpacked(fixed[:, -LEVEL_0_BYTES:], 2).reshape(-1)]
    left = []  # indices, among the values that reach a level, of those that it passes on
    counts = np.full(len(fixed), BLOCK_VALUES)
    at = starts + layout.fixed_bytes
    for level in range(LEVELS):
        left.append(np.flatnonzero(codes[level] == PASSED_ON))
        counts = _count_by_block(left[level], counts)
        if level + 1 < LEVELS:
            words = _word_counts(counts)
            fields = _unpacked(padded.view("<u4")[_ranges(at // 4, words)].view(np.uint8), 2)
            codes.append(fields[_ranges(CODES_PER_WORD * (np.cumsum(words) - words), counts)])
            at = at + 4 * words
    symbols = padded[_ranges(at, counts)]  # too large ones, from damaged bytes, are shifted out below
    for level in reversed(range(LEVELS)):
        found = np.array([*code.parameters[3 * level : 3 * level + 3], 0], np.uint8)[codes[level]]
        found[left[level]] = symbols
        symbols = found
    rotated |= symbols.astype(layout.dtype) << layout.raw_bits
    values: Values = (rotated >> 1) | (rotated << (layout.value_bits - 1))
    return values.view(np.uint8)


def _rotated(layout: ExponentLayout, content: Bytes) -> Values:
    values: Values = np.ascontiguousarray(content).view(layout.dtype)
    rotated: Values = (values << 1) | (values >> (layout.value_bits - 1))
    return rotated


def _places(code: Code) -> Bytes:
    """The place of each symbol."""
    places = np.full(256, PLACES, np.uint8)
    places[list(code.parameters[:PLACES])] = np.arange(PLACES)
    return places


def _word_counts(codes: Integers) -> Integers:
    return -(-codes // CODES_PER_WORD)


def _aligned(nbytes: _Size) -> _Size:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _count_by_block(places: Integers, counts: Integers) -> Integers:
    """How many of the (rising) places lie in each block, where blocks have `counts` places one after another."""
    return np.diff(np.searchsorted(places, np.cumsum(counts)), prepend=0)


def _ranges(starts: Integers, counts: Integers) -> Integers:
    """`counts` numbers up from each start, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])


def _padded(content: Bytes, multiple: int) -> Bytes:
    """With zeros after it, up to a multiple of so many."""
    padding = -content.size % multiple
    return np.concatenate([content, np.zeros(padding, np.uint8)]) if padding else content


def _packed(fields: Bytes, width: int) -> Bytes:
    """Fields (each below 1 << width) side by side, the first in a byte's lowest bits; they fill whole words."""
    fields, per_byte = _padded(fields, CODES_PER_WORD), 8 // width
    packed: Bytes = fields[::per_byte].copy()
    for place in range(1, per_byte):
        packed |= fields[place::per_byte] << (place * width)
    return packed


def _unpacked(packed: Bytes, width: int) -> Bytes:
    """The fields of `_packed` along the last axis."""
    fields: Bytes = packed if width == 8 else _fields(width)[packed].view(np.uint8)
    return fields


@lru_cache
def _fields(width: int) -> Values:
    """For each byte the fields in it, one to a byte of a word."""
    fields = np.arange(256)[:, None] >> np.arange(0, 8, width) & ((1 << width) - 1)
    words: Values = fields.astype(np.uint8).view(f"<u{8 // width}").reshape(-1)
    return words
