"""The codec on the GPU: Triton kernels that count, encode and decode, one program per block.

The format is described in exponent.py. Blocks are independent: a decoder finds its block through the chunk's header, an
encoder takes the next free place in the chunk. A running count over the block says where values go on each level. Only
addresses are passed, so a table in pinned memory, a segment and host memory are treated alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .exponent import ALIGN_BYTES, BLOCK_VALUES, LEVEL_0_BYTES, PASSED_ON, PLACES, ExponentLayout

_VALUES = tl.constexpr(BLOCK_VALUES)
_LEVEL_0_BYTES = tl.constexpr(LEVEL_0_BYTES)
_ALIGN = tl.constexpr(ALIGN_BYTES)
_PASSED_ON = tl.constexpr(PASSED_ON)
_PLACES = tl.constexpr(PLACES)

# The fastest of those tried on an H200 (`codec.json`). Registers limit how many programs fit on a
# multiprocessor: with 64 registers, four programs of 8 warps, and little is spilled.
_COUNT_OPTIONS = {"num_warps": 8}
_ENCODE_OPTIONS = {"num_warps": 8, "maxnreg": 64}
_DECODE_OPTIONS = {"num_warps": 8, "maxnreg": 64}


def count(layout: ExponentLayout, table: int, chunks: int) -> None:
    """Add up the encoded size of each chunk, on the current stream.

    A row's source is the chunk, its target a u32 that the caller has zeroed.
    """
    _count_blocks[_grid(layout, chunks)](table, *_constants(layout), **_COUNT_OPTIONS)


def encode(layout: ExponentLayout, table: int, counters: int, chunks: int) -> None:
    """Encode chunks, on the current stream.

    A row's source is the chunk, its target memory for the encoded bytes that were counted and that the row states.
    `counters` is the address of a u32 for each chunk. The caller has zeroed the targets and the counters.

    If the content has changed since it was counted and a block no longer fits, nothing of the block is written. So a
    chunk is good if its counter plus the layout's `header_bytes` equals the row's encoded bytes.
    """
    _encode_blocks[_grid(layout, chunks)](table, counters, *_constants(layout), **_ENCODE_OPTIONS)


def decode(layout: ExponentLayout, table: int, chunks: int) -> None:
    """Decode chunks, on the current stream; a row's source (device or pinned memory) and target are 16-byte aligned.

    Nothing outside of the row's encoded bytes is read, and nothing outside of the chunk written, whatever the bytes.
    """
    _decode_blocks[_grid(layout, chunks)](table, *_constants(layout), **_DECODE_OPTIONS)


def _grid(layout: ExponentLayout, chunks: int) -> tuple[int]:
    return (chunks * layout.blocks_per_chunk,)


def _constants(layout: ExponentLayout) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
    """BLOCKS in a chunk, BITS of a value, RAW bits of those, and the PLANES: width, and lowest bit in a value."""
    return layout.blocks_per_chunk, layout.value_bits, layout.raw_bits, layout.placed_planes


# What follows is compiled. Parameters have no types because Triton reads annotations.


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def _count_blocks(table, BLOCKS: tl.constexpr, BITS: tl.constexpr, RAW: tl.constexpr, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ARG001, N803  (started as the others are)
    _, block, source, target, low, high = _row(table, BLOCKS)
    places = _places(_rotated(source, block, BITS) >> RAW, low, high)
    passed_on = tl.sum(_passed_on(places), 0)
    symbols = tl.sum((places == _PLACES).to(tl.int32), 0)
    nbytes = _block_bytes(passed_on, symbols, RAW) + tl.where(block == 0, _header_bytes(BLOCKS), 0)
    tl.atomic_add(target.to(tl.pointer_type(tl.uint32)), nbytes.to(tl.uint32), sem="relaxed")


@triton.jit(do_not_specialize=["table", "counters"])  # type: ignore[untyped-decorator]
def _encode_blocks(table, counters, BLOCKS: tl.constexpr, BITS: tl.constexpr, RAW: tl.constexpr, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    chunk, block, source, target, low, high = _row(table, BLOCKS)
    rotated = _rotated(source, block, BITS)
    symbols = rotated >> RAW
    places = _places(symbols, low, high)
    ranks, passed_on = _ranks(_passed_on(places))
    last_ranks, last = _ranks((places == _PLACES).to(tl.int32))

    nbytes = _block_bytes(passed_on, last, RAW)
    counter = counters.to(tl.pointer_type(tl.uint32)) + chunk
    start = tl.atomic_add(counter, nbytes.to(tl.uint32), sem="relaxed").to(tl.int64) + _header_bytes(BLOCKS)
    fits = start + nbytes <= (high >> 32).to(tl.int64)
    tl.store(target.to(tl.pointer_type(tl.uint32)) + block, start.to(tl.uint32), mask=fits)

    at = tl.multiple_of((target + start.to(tl.uint64)).to(tl.pointer_type(tl.uint8)), 16)
    for plane in tl.static_range(len(PLANES)):
        _store_fields(at + _VALUES // 8 * PLANES[plane][1], rotated >> PLANES[plane][1], PLANES[plane][0], fits)
    at += _VALUES // 8 * RAW
    _store_fields(at, tl.minimum(places, _PASSED_ON), 2, fits)
    at += _LEVEL_0_BYTES
    _add_fields(at, ranks & 0xFFFF, tl.where(places > 3, tl.minimum(places - 3, _PASSED_ON), 0), 2, fits)
    at += _level_bytes(passed_on & 0xFFFF)
    _add_fields(at, ranks >> 16, tl.where(places > 6, tl.minimum(places - 6, _PASSED_ON), 0), 2, fits)
    at += _level_bytes(passed_on >> 16)
    _add_fields(at, last_ranks, tl.where(places == _PLACES, symbols, 0), 8, fits)


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def _decode_blocks(table, BLOCKS: tl.constexpr, BITS: tl.constexpr, RAW: tl.constexpr, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    _, block, source, target, low, high = _row(table, BLOCKS)
    limit = (high >> 32).to(tl.uint32) & (0x100000000 - _ALIGN)
    start = tl.load(source.to(tl.pointer_type(tl.uint32)) + block, mask=4 * block < limit, other=0)
    start = tl.minimum(start & (0x100000000 - _ALIGN), limit)
    at = tl.multiple_of((source + start).to(tl.pointer_type(tl.uint8)), 16)
    left = tl.multiple_of((limit - start).to(tl.int32), 16)  # bytes, from the block's start

    rotated = tl.zeros([_VALUES], tl.uint32)
    for plane in tl.static_range(len(PLANES)):
        fields = _load_fields(at, _VALUES // 8 * PLANES[plane][1], left, PLANES[plane][0])
        rotated |= fields << PLANES[plane][1]
    codes0 = _load_fields(at, _VALUES // 8 * RAW, left, 2)
    rank1, n0 = _ranks((codes0 == _PASSED_ON).to(tl.int32))
    level1 = _VALUES // 8 * RAW + _LEVEL_0_BYTES
    codes1 = _load_codes(at, level1, left, rank1, codes0 == _PASSED_ON)
    rank2, n1 = _ranks((codes1 == _PASSED_ON).to(tl.int32))
    level2 = level1 + _level_bytes(n0)
    codes2 = _load_codes(at, level2, left, rank2, codes1 == _PASSED_ON)
    rank3, _ = _ranks((codes2 == _PASSED_ON).to(tl.int32))
    place = level2 + _level_bytes(n1) + rank3
    symbols = tl.load(at + place, mask=(codes2 == _PASSED_ON) & (place < left), other=0).to(tl.uint32)

    # Three symbols to a word, so that no shift is of 64 bits.
    third = (low >> 48).to(tl.uint32) | ((high.to(tl.uint32) & 0xFF) << 16)
    symbols = tl.where(codes2 == _PASSED_ON, symbols, third >> (8 * codes2))
    symbols = tl.where(codes1 == _PASSED_ON, symbols, (low >> 24).to(tl.uint32) >> (8 * codes1))
    symbols = tl.where(codes0 == _PASSED_ON, symbols, low.to(tl.uint32) >> (8 * codes0))
    symbols &= (1 << (BITS - RAW)) - 1
    rotated |= symbols << RAW
    values = (rotated >> 1) | ((rotated & 1) << (BITS - 1))
    pointer = _pointer(target, BITS)
    tl.store(pointer + block * _VALUES + tl.arange(0, _VALUES), values.to(pointer.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _row(table, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The program's chunk and block, and the chunk's row: source, target, symbols 0 to 7, the rest."""
    program = tl.program_id(0)
    chunk = program // BLOCKS
    row = table.to(tl.pointer_type(tl.uint64)) + 4 * chunk
    return chunk, program % BLOCKS, tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(address, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A pointer to values of BITS bits; chunks lie at multiples of 16 bytes."""
    if BITS == 32:
        pointer = address.to(tl.pointer_type(tl.uint32))
    elif BITS == 16:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(source, block, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The block's values, each rotated left by one bit: the sign is lowest, and the symbol highest."""
    values = tl.load(_pointer(source, BITS) + block * _VALUES + tl.arange(0, _VALUES)).to(tl.uint32)
    return ((values << 1) & ((1 << BITS) - 1)) | (values >> (BITS - 1))


@triton.jit
def _places(symbols, low, high):  # type: ignore[no-untyped-def]
    """The place of each symbol in the code."""
    places = tl.full([_VALUES], _PLACES, tl.uint32)
    for place in tl.static_range(_PLACES):
        if place < 8:
            places = tl.where(symbols == ((low >> (8 * place)).to(tl.uint32) & 0xFF), place, places)
        else:
            places = tl.where(symbols == (high.to(tl.uint32) & 0xFF), place, places)
    return places


@triton.jit
def _passed_on(places):  # type: ignore[no-untyped-def]
    """Ones where level 0 passes on and, from bit 16 up, where level 1 does: so both are counted at once."""
    return (places >= 3).to(tl.int32) + ((places >= 6).to(tl.int32) << 16)


@triton.jit
def _ranks(ones):  # type: ignore[no-untyped-def]
    """For each value how many ones precede it, and the number of ones."""
    return tl.cumsum(ones, 0) - ones, tl.sum(ones, 0)


@triton.jit
def _level_bytes(codes):  # type: ignore[no-untyped-def]
    return (codes + 15) // 16 * 4


@triton.jit  # type: ignore[untyped-decorator]
def _header_bytes(BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    return (4 * BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN


@triton.jit  # type: ignore[untyped-decorator]
def _block_bytes(passed_on, symbols, RAW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    levels = _LEVEL_0_BYTES + _level_bytes(passed_on & 0xFFFF) + _level_bytes(passed_on >> 16)
    nbytes = _VALUES // 8 * RAW + levels + symbols
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


@triton.jit  # type: ignore[untyped-decorator]
def _store_fields(at, fields, WIDTH: tl.constexpr, fits):  # type: ignore[no-untyped-def]  # noqa: N803
    """The lowest WIDTH bits of each value side by side."""
    PER_WORD: tl.constexpr = 32 // WIDTH  # noqa: N806
    parts = (fields & ((1 << WIDTH) - 1)).reshape(_VALUES // PER_WORD, PER_WORD)
    words = tl.sum(parts << (tl.arange(0, PER_WORD) * WIDTH).to(tl.uint32)[None, :], 1)
    tl.store(at.to(tl.pointer_type(tl.uint32)) + tl.arange(0, _VALUES // PER_WORD), words, mask=fits)


@triton.jit  # type: ignore[untyped-decorator]
def _load_fields(at, begin, left, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Load what `_store_fields` stored at `begin` of the block."""
    PER_WORD: tl.constexpr = 32 // WIDTH  # noqa: N806
    place = tl.arange(0, _VALUES // PER_WORD)
    words = tl.load((at + begin).to(tl.pointer_type(tl.uint32)) + place, mask=place < (left - begin) // 4, other=0)
    fields = words[:, None] >> (tl.arange(0, PER_WORD) * WIDTH).to(tl.uint32)[None, :]
    return (fields & ((1 << WIDTH) - 1)).reshape(_VALUES)


@triton.jit  # type: ignore[untyped-decorator]
def _add_fields(at, ranks, fields, WIDTH: tl.constexpr, fits):  # type: ignore[no-untyped-def]  # noqa: N803
    """Store fields of WIDTH bits in the order of their rising `ranks`. Fields to skip are 0, as the memory is.

    As many values as a word has fields touch at most two words. They are combined first, because atomic operations are
    many times slower than the rest.
    """
    PER_WORD: tl.constexpr = 32 // WIDTH  # noqa: N806
    ranks = ranks.reshape(_VALUES // PER_WORD, PER_WORD)
    shifted = fields.reshape(_VALUES // PER_WORD, PER_WORD) << ((ranks & (PER_WORD - 1)) * WIDTH).to(tl.uint32)
    word = tl.min(ranks // PER_WORD, 1)
    first = (ranks // PER_WORD) == word[:, None]
    pointer = at.to(tl.pointer_type(tl.uint32)) + word
    for place in tl.static_range(2):
        bits = tl.sum(tl.where(first == (place == 0), shifted, 0), 1)
        tl.atomic_or(pointer + place, bits, mask=(bits != 0) & fits, sem="relaxed")


@triton.jit
def _load_codes(at, begin, left, ranks, chosen):  # type: ignore[no-untyped-def]
    """The code of each chosen value; 0 for the others."""
    place = begin + 4 * (ranks >> 4)
    words = tl.load((at + place).to(tl.pointer_type(tl.uint32)), mask=chosen & (place < left), other=0)
    return (words >> (2 * (ranks & 15)).to(tl.uint32)) & 3
