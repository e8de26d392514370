"""The kernels in PTX, without a GPU: an assembler accepts them, and they do what they should."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from ptx import Kernel, Memory, kernels

from cumem_sleep.digest.reference import CHUNK_BYTES, sums_of

TABLE, SUMS, CONTENT = 1 << 20, 1 << 21, 1 << 40


def assembler() -> str:
    """CUDA's, or the one in Triton's wheels."""
    triton = importlib.util.find_spec("triton")
    bundled = pathlib.Path(str(triton.origin)).parent / "backends/nvidia/bin/ptxas" if triton else None
    found = str(bundled) if bundled is not None and bundled.is_file() else shutil.which("ptxas")
    if found is None:
        pytest.skip("needs ptxas, of CUDA's compiler or of Triton: pip install triton")
    return found


NAMES = ["cumem_sleep_copy", "cumem_sleep_copy_pieces", "cumem_sleep_digest"]


def test_there_are_three() -> None:
    assert sorted(kernels()) == NAMES


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_assembled(tmp_path: pathlib.Path, name: str, architecture: str) -> None:
    source, target = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(kernels()[name])
    command = [assembler(), f"-arch={architecture}", "-v", str(source), "-o", str(target)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "0 bytes spill stores" in process.stderr, "its registers suffice"
    assert target.stat().st_size > 0


def words(content: bytes) -> list[int]:
    found: list[int] = np.frombuffer(content, np.uint64).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [CHUNK_BYTES, 16, 8192, 8208, 32768, 32768 + 16400, 65536 + 32752])
def test_the_digest_is_the_reference(nbytes: int) -> None:
    """The second block has the second chunk of the table, which is any chunk of its content, whole or short."""
    content = np.random.default_rng(5).bytes(nbytes)
    number = (1 << 32) - 3
    memory = Memory()
    memory.words |= {CONTENT + 8 * at: word for at, word in enumerate(words(content))}
    memory.put_pair(TABLE + 16, (CONTENT, number | nbytes << 32))
    Kernel(kernels()["cumem_sleep_digest"]).run(memory, {"chunks": TABLE, "sums": SUMS}, block=1, blocks=2, threads=512)
    assert memory.pair(SUMS + 16) == sums_of(np.frombuffer(content, np.uint8), number)
    assert SUMS not in memory.words


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("pairs", [0, 1, 31, 128, 300])
def test_the_copy_is_whole_and_no_more(blocks: int, pairs: int) -> None:
    content = words(np.random.default_rng(6).bytes(16 * (pairs + 1)))
    memory = Memory()
    memory.words |= {CONTENT + 8 * at: word for at, word in enumerate(content)}
    kernel = Kernel(kernels()["cumem_sleep_copy"])
    for block in range(blocks):
        kernel.run(memory, {"target": TABLE, "source": CONTENT, "bytes": 16 * pairs}, block, blocks, threads=32)
    copied = {address: word for address, word in memory.words.items() if address < CONTENT}
    assert copied == {TABLE + 8 * at: word for at, word in enumerate(content[: 2 * pairs])}


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_the_copies_of_a_table_are_whole_and_no_more(blocks: int) -> None:
    content = words(np.random.default_rng(7).bytes(16 * 700))
    memory = Memory()
    memory.words |= {CONTENT + 8 * at: word for at, word in enumerate(content)}
    expected, source = {}, 0
    pairs = [0, 1, 31, 128, 300]
    for number, count in enumerate(pairs):
        target = SUMS + 8192 * (len(pairs) - number)
        memory.put_pair(TABLE + 32 * number, (target, CONTENT + source))
        memory.put_pair(TABLE + 32 * number + 16, (16 * count, 0))
        expected.update({target + 8 * at: content[source // 8 + at] for at in range(2 * count)})
        source += 16 * (count + 1)
    kernel = Kernel(kernels()["cumem_sleep_copy_pieces"])
    for block in range(blocks):
        kernel.run(memory, {"pieces": TABLE, "count": len(pairs)}, block, blocks, threads=32)
    assert {address: word for address, word in memory.words.items() if SUMS <= address < CONTENT} == expected
