"""The codec of weights: nothing is ever lost, sizes are known beforehand, and damaged bytes harm nobody."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumem_sleep.codec import codecs
from cumem_sleep.codec import exponent as codec
from cumem_sleep.codec.codec import CHUNK_BYTES, Code
from cumem_sleep.codec.exponent import BLOCK_VALUES, LAYOUTS, ExponentLayout

Bytes = npt.NDArray[np.uint8]
BF16, FP16, E4M3, E5M2, FP32 = LAYOUTS

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def tiled(pattern: Bytes | bytes, chunks: int = 1) -> Bytes:
    return np.resize(np.frombuffer(pattern, np.uint8), chunks * CHUNK_BYTES)


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def normal(count: int, deviation: float = 0.02, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(deviation)


def rounded(values: npt.NDArray[np.float32], exponent_bits: int, mantissa_bits: int) -> Bytes:
    """The nearest floating-point numbers of 8 bits, subnormal ones as well; what is too large becomes the largest.

    The largest is that of IEEE's rule for e5m2, and of "fn" (only the highest code is NaN) for e4m3.
    """
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    numbers = np.where(
        exponents == 0,
        mantissas * 2.0 ** (1 - bias - mantissa_bits),
        (1 + mantissas * 2.0**-mantissa_bits) * 2.0 ** (exponents - bias),
    )
    finite = len(codes) - 1 if exponent_bits == 4 else len(codes) - (1 << mantissa_bits)
    between = (numbers[: finite - 1] + numbers[1:finite]) / 2
    return (np.searchsorted(between, np.abs(values)) | np.signbit(values) * 128).astype(np.uint8)


def as_type(layout: ExponentLayout, values: npt.NDArray[np.float32]) -> Bytes:
    if layout is BF16:
        words = values.view(np.uint32)
        return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)
    if layout is FP16:
        return values.astype("<f2").view(np.uint8)
    if layout is FP32:
        return values.astype("<f4").view(np.uint8)
    return rounded(values, layout.symbol_bits, layout.raw_bits - 1)


@lru_cache(maxsize=32)  # most tests want the same
def weights(layout: ExponentLayout, chunks: int = 1, deviation: float | None = None, seed: int = 0) -> Bytes:
    """Whole chunks of normal values; types of 8 bits are scaled to their range, as quantisation does."""
    if deviation is None:
        deviation = 1.0 if layout.value_bytes == 1 else 0.02
    values = as_type(layout, normal(chunks * CHUNK_BYTES // layout.value_bytes, deviation, seed))
    values.flags.writeable = False
    return values


def values_of(layout: ExponentLayout, symbols: npt.ArrayLike, seed: int = 0) -> Bytes:
    """Values with these symbols, tiled to a chunk, and random other bits."""
    count = CHUNK_BYTES // layout.value_bytes
    raw = np.random.default_rng(seed).integers(0, 1 << layout.raw_bits, count, np.uint64)
    rotated = np.resize(np.asarray(symbols, np.uint64), count) << np.uint64(layout.raw_bits) | raw
    plain = rotated >> np.uint64(1) | rotated << np.uint64(layout.value_bits - 1)
    return plain.astype(layout.dtype).view(np.uint8)


def code_of(layout: ExponentLayout, first: int = 0) -> Code:
    """Nine symbols that need not suit the content."""
    return Code(layout, bytes(range(first, first + 9)))


def choose_codes(samples: Bytes, worth: float = 0.95) -> list[Code | None]:
    return codecs.choose_codes(samples, worth)


def choose_code(sample: Bytes, worth: float = 0.95) -> Code | None:
    return choose_codes(sample.reshape(1, -1), worth)[0]


def largest_chunk_bytes(layout: ExponentLayout) -> int:
    return layout.header_bytes + layout.blocks_per_chunk * layout.largest_block_bytes


def assert_round_trip(code: Code, content: Bytes) -> Bytes:
    sizes = codec.chunk_bytes(code, content)
    stored = codec.encode(code, content)
    assert len(sizes) == content.size // CHUNK_BYTES
    assert stored.size == sizes.sum()
    assert code.layout.smallest_chunk_bytes <= sizes.min()
    assert sizes.max() <= largest_chunk_bytes(code.layout)
    assert codecs.least_bytes(content.size) <= stored.size
    assert np.array_equal(codec.decode(code, stored, sizes), content)
    return stored


class TestDefinition:
    """The format itself: what was stored once must be read for ever."""

    @every_layout
    def test_a_layout_uses_every_bit_once(self, layout: ExponentLayout) -> None:
        assert layout.symbol_bits + layout.raw_bits == 8 * layout.value_bytes
        assert layout.header_bytes == 4 * layout.blocks_per_chunk
        assert layout.blocks_per_chunk * layout.value_bytes * BLOCK_VALUES == CHUNK_BYTES

    @every_layout
    def test_is_what_it_says_bit_by_bit(self, layout: ExponentLayout) -> None:
        content = values_of(layout, np.random.default_rng(3).integers(0, 12, 60_000))
        stored = codec.encode(code_of(layout), content).tobytes()
        size = CHUNK_BYTES // layout.blocks_per_chunk
        for block in (0, 1, layout.blocks_per_chunk - 1):
            begin = int.from_bytes(stored[4 * block : 4 * block + 4], "little")
            raw = content[block * size : (block + 1) * size].tobytes()
            encoded = plainly_encoded(layout, raw)
            assert stored[begin : begin + len(encoded)] == encoded

    def test_blocks_lie_one_after_another_without_gaps(self) -> None:
        content = weights(BF16)
        code = code_of(BF16, 114)
        stored = codec.encode(code, content)
        starts = stored[: BF16.header_bytes].view("<u4").astype(int)
        assert starts[0] == BF16.header_bytes
        assert (starts % 16 == 0).all()
        blocks = content[: 40 * 8192].reshape(40, 8192)
        assert np.diff(starts[:41]).tolist() == [len(plainly_encoded(BF16, block.tobytes(), 114)) for block in blocks]

    @every_layout
    @pytest.mark.parametrize("kinds", [1, 8, 256])
    def test_a_code_has_nine_different_symbols(self, layout: ExponentLayout, kinds: int) -> None:
        """However few there are in the sample."""
        sample = (random_bytes(8192).astype(np.int64) % kinds).astype(np.uint8)
        ((symbols,), _) = codec.rank(layout, sample[None])
        assert len(set(symbols.tolist()) & set(range(1 << layout.symbol_bits))) == 9


def plainly_encoded(layout: ExponentLayout, raw: bytes, first: int = 0) -> bytes:
    """One block by the format's description, with the symbols `first` to `first + 8` in the code."""
    bits = layout.value_bits
    values = [int.from_bytes(raw[i : i + layout.value_bytes], "little") for i in range(0, len(raw), layout.value_bytes)]
    rotated = [(value << 1 | value >> (bits - 1)) & ((1 << bits) - 1) for value in values]

    def packed(fields: list[int], width: int, align: int = 1) -> bytes:
        number = sum(field << (place * width) for place, field in enumerate(fields))
        return number.to_bytes(-(-len(fields) * width // (8 * align)) * align, "little")

    parts, shift = [], 0
    for width in layout.planes:
        parts.append(packed([value >> shift & ((1 << width) - 1) for value in rotated], width))
        shift += width
    symbols = [value >> shift for value in rotated]
    for level in range(3):
        table = {first + 3 * level + code: code for code in range(3)}
        parts.append(packed([table.get(symbol, 3) for symbol in symbols], 2, 4))
        symbols = [symbol for symbol in symbols if symbol not in table]
    encoded = b"".join([*parts, bytes(symbols)])
    return encoded + bytes(-len(encoded) % 16)


class TestRoundTrip:
    @every_layout
    def test_normal_values(self, layout: ExponentLayout) -> None:
        content = weights(layout)
        code = choose_code(content[:8192])
        assert code is not None
        assert assert_round_trip(code, content).size < 0.95 * content.size

    @every_layout
    def test_every_value(self, layout: ExponentLayout) -> None:
        count = min(1 << layout.value_bits, CHUNK_BYTES // layout.value_bytes)
        step = (1 << layout.value_bits) // count
        every = (np.arange(count, dtype=np.uint64) * step + np.arange(count) % step).astype(layout.dtype)
        assert_round_trip(code_of(layout), tiled(every.view(np.uint8)))

    @pytest.mark.slow
    @settings(max_examples=40, deadline=None)
    @given(
        pattern=st.binary(min_size=1, max_size=3000),
        layout=st.sampled_from(LAYOUTS),
        seed=st.integers(0, 1000),
    )
    def test_any_pattern(self, pattern: bytes, layout: ExponentLayout, seed: int) -> None:
        symbols = np.random.default_rng(seed).permutation(1 << layout.symbol_bits)[:9]
        assert_round_trip(Code(layout, bytes(symbols.tolist())), tiled(pattern))


class TestRatio:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("layout", "most"), [(BF16, 0.67), (FP16, 0.87), (E4M3, 0.86), (E5M2, 0.72), (FP32, 0.84)], ids=str
    )
    @pytest.mark.parametrize("deviation", [1.0, 0.02, 0.0173])
    def test_of_normal_values(self, layout: ExponentLayout, most: float, deviation: float) -> None:
        if layout.value_bytes == 1:
            deviation *= 60  # as quantisation scales to the type's range
        content = weights(layout, 2, deviation)
        code = choose_code(content[:8192])
        assert code is not None
        assert code.layout is layout
        assert codec.chunk_bytes(code, content).sum() <= most * content.size

    @every_layout
    def test_the_expected_ratio_is_what_comes_out(self, layout: ExponentLayout) -> None:
        content = weights(layout)
        ((symbols,), (ratio,)) = codec.rank(layout, content[None])
        sizes = codec.chunk_bytes(Code(layout, bytes(symbols.tolist())), content)
        excess = (sizes.sum() - ratio * content.size) / layout.blocks_per_chunk
        assert 4 < excess < 24  # of each block: its place in the header, words that are not full, padding


class TestChoice:
    @every_layout
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
    @pytest.mark.parametrize("outliers", [0.0, 0.05])
    def test_finds_the_type(self, layout: ExponentLayout, scale: float, outliers: float) -> None:
        if layout is E4M3:
            scale **= 1 / 3  # its range is small: further down most are subnormal, and other layouts do indeed better
        for seed in range(5):
            values = normal(8192 // layout.value_bytes, scale, seed)
            values[np.random.default_rng(seed).random(values.size) < outliers] *= 30
            code = choose_code(as_type(layout, values))
            assert code is not None
            assert code.layout is layout

    @pytest.mark.parametrize("nbytes", [4, 64, 1024, 8192])
    def test_of_samples_of_any_size(self, nbytes: int) -> None:
        code = choose_code(weights(BF16)[:nbytes])
        assert code is not None

    def test_agrees_with_pytorch_about_the_types(self) -> None:
        torch = pytest.importorskip("torch")
        values = torch.from_numpy(normal(4096, 1.0))
        for layout, dtype in ((BF16, "bfloat16"), (FP16, "float16"), (E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")):
            theirs = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
            assert np.array_equal(theirs, as_type(layout, values.numpy()))
            code = choose_code(theirs)
            assert code is not None
            assert code.layout is layout

    def test_random_bytes_are_not_worth_it(self) -> None:
        assert choose_codes(random_bytes(64 * 8192).reshape(64, -1)) == [None] * 64

    def test_worth_is_a_limit(self) -> None:
        sample = weights(BF16)[:8192]
        assert choose_code(sample, worth=0.68) is not None
        assert choose_code(sample, worth=0.65) is None

    def test_the_most_frequent_symbols_come_first(self) -> None:
        symbols = np.repeat(np.arange(100, 112), np.arange(12, 0, -1))
        code = choose_code(values_of(BF16, symbols)[: 2 * 78 * 64])
        assert code == Code(BF16, bytes(range(100, 109)))

    @pytest.mark.slow
    def test_many_at_once_equal_each_alone(self) -> None:
        samples = np.stack(
            [*(weights(layout)[:8192] for layout in LAYOUTS), random_bytes(8192), tiled(b"\0")[:8192]] * 30
        )
        assert choose_codes(samples) == [choose_code(sample) for sample in samples]
        assert choose_codes(samples[:, ::2]) == [choose_code(sample[::2].copy()) for sample in samples]

    def test_of_nothing(self) -> None:
        assert choose_codes(np.zeros((0, 8192), np.uint8)) == []
        assert choose_codes(np.zeros((2, 0), np.uint8)) == [None, None]


class TestDamage:
    """Decoding never fails, whatever the bytes; what comes out is for the digest to judge."""

    @pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.name)
    def encoded(self, request: pytest.FixtureRequest) -> tuple[Code, Bytes, Bytes]:
        content = weights(request.param)
        code = choose_code(content[:8192])
        assert code is not None
        return code, content, codec.encode(code, content)

    @pytest.mark.slow
    @pytest.mark.parametrize("offset", [0xFFFFFFFF, 0x80000000, 0x7FFFFFF0, 1 << 20, 7])
    def test_of_the_header(self, encoded: tuple[Code, Bytes, Bytes], offset: int) -> None:
        code, content, stored = encoded
        damaged = stored.copy()
        damaged[: code.layout.header_bytes].view("<u4")[3] = offset
        decoded = codec.decode(code, damaged, [stored.size]).reshape(code.layout.blocks_per_chunk, -1)
        expected = content.reshape(decoded.shape)
        assert not np.array_equal(decoded[3], expected[3])
        assert np.array_equal(np.delete(decoded, 3, 0), np.delete(expected, 3, 0))

    @pytest.mark.slow
    @pytest.mark.parametrize("byte", [0, 0xFF, 0xAA])
    def test_of_the_codes(self, encoded: tuple[Code, Bytes, Bytes], byte: int) -> None:
        """More are passed on than the block has room for, up to the chunk's end."""
        code, content, stored = encoded
        damaged = stored.copy()
        last = int(damaged[: code.layout.header_bytes].view("<u4")[-1])
        damaged[last:] = byte
        decoded = codec.decode(code, damaged, [stored.size]).reshape(code.layout.blocks_per_chunk, -1)
        assert np.array_equal(decoded[:-1], content.reshape(decoded.shape)[:-1])

    @pytest.mark.slow
    @pytest.mark.parametrize("left", [0, 1, 15, 16, 500, 100_000, -1, -15, -16, -1000])
    def test_of_sizes(self, encoded: tuple[Code, Bytes, Bytes], left: int) -> None:
        code, content, stored = encoded
        size = left % stored.size
        cut = codec.decode(code, stored[:size], [size])
        if stored.size - size > 16:  # the last ones may be padding
            assert not np.array_equal(cut, content)
        assert np.array_equal(codec.decode(code, stored[:size], [stored.size]), cut)  # said to be more than there is
        assert np.array_equal(codec.decode(code, stored, [size]), cut)  # said to be less
