"""Content digests of device memory: 128 bits, position-dependent, the same from the GPU and from NumPy.

The bytes are little-endian 64-bit words, cut into chunks of `CHUNK_BYTES`; a chunk is `ROWS` rows of `LANES` words. The
last chunk may be short: then the chains of lanes for which it has no more words end earlier.
Each lane walks down its column with two independent chains,

    a = (a ^ word) * K;  a ^= a >> s        (all modulo 2^64; the second chain takes the word with its halves swapped)

that start from the chunk's number and the lane's. A step is a bijection of the state for a given word, and of the word
for a given state, so a changed word always changes the end of its chain. Ends are mixed (MurmurHash3's 64-bit
finaliser, also a bijection) and summed over all lanes and chunks, once per chain: a single changed word always changes
both sums. Changes of the highest bits of two words can be made to cancel in one chain, but those are not the highest
bits for the other; accidental damage goes undetected with a probability near 2^-128. Sums do not depend on order, so
chunks run in parallel. This detects damage; it does not resist an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LANES = 2048
ROWS = 64
CHUNK_BYTES = LANES * ROWS * 8

# Odd constants with well-spread bits: golden ratio, MurmurHash3 and SplitMix64.
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
SHIFTS = (32, 29)
SEEDS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
FINAL = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
MASK = (1 << 64) - 1

_CACHED_CHUNKS = 8  # their state stays in a core's cache

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Digest:
    """128 bits that stand for the content of some memory, length included."""

    high: int
    low: int

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"


def chunks_of(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many chunks contents of so many bytes have, short ones included."""
    return -(-nbytes // CHUNK_BYTES)


def sums_of(
    content: npt.NDArray[np.uint8], first_chunk: int = 0, chunks_at_once: int = _CACHED_CHUNKS
) -> tuple[int, int]:
    """Both sums over the chunks of `content`, whose first chunk is number `first_chunk`.

    The end is padded with zeros to 16 bytes. Sums of pieces that start on chunk boundaries add up (modulo 2^64) to the
    sums of the whole.
    """
    totals = [0, 0]
    whole_bytes = content.size - content.size % CHUNK_BYTES
    step = chunks_at_once * CHUNK_BYTES
    for start in [*range(0, whole_bytes, step), *([whole_bytes] if whole_bytes < content.size else [])]:
        piece = content[start : min(start + step, whole_bytes) if start < whole_bytes else content.size]
        if padding := -piece.size % 16:
            piece = np.concatenate([piece, np.zeros(padding, np.uint8)])
        words = piece.view("<u8").reshape(-(-piece.size // CHUNK_BYTES), -1)
        numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first_chunk + start // CHUNK_BYTES)
        for chain in range(2):
            totals[chain] = (totals[chain] + _chain_sum(words, numbers, chain)) & MASK
    return totals[0], totals[1]


def _chain_sum(words: Words, numbers: Words, chain: int) -> int:
    multiplier, shift = np.uint64(MULTIPLIERS[chain]), np.uint64(SHIFTS[chain])
    lanes = np.arange(LANES, dtype=np.uint64)
    ends = (numbers[:, None] * np.uint64(LANES) + lanes + np.uint64(1)) * np.uint64(SEEDS[chain])
    scratch = np.empty_like(ends)
    for first in range(0, words.shape[1], LANES):
        row = words[:, first : first + LANES]
        state, shifted = ends[:, : row.shape[1]], scratch[:, : row.shape[1]]
        if chain == 0:
            np.bitwise_xor(state, row, out=state)
        else:  # with its halves swapped
            for half in (np.left_shift, np.right_shift):
                half(row, np.uint64(32), out=shifted)
                np.bitwise_xor(state, shifted, out=state)
        np.multiply(state, multiplier, out=state)
        np.right_shift(state, shift, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
    for constant in (*FINAL, None):
        ends ^= ends >> np.uint64(33)
        if constant is not None:
            ends *= np.uint64(constant)
    return int(ends.sum(dtype=np.uint64))


def digests_from(sums: Words, sizes: Sequence[int]) -> list[Digest]:
    """From both sums of each content and its length, which tells contents apart that differ only in zero padding."""
    mixed = (sums ^ np.array(sizes, np.uint64)[:, None]) * np.array(MULTIPLIERS, np.uint64)
    mixed ^= mixed >> np.uint64(32)
    return [Digest(high, low) for high, low in mixed.tolist()]
