"""The content digest: the same values for ever, and no damage unseen."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from support import (
    PAGE,
    Memory,
    digest_by_the_kernel,
    digest_of,
    in_thread,
    quick_sums,
)

from cumem_sleep import CuMemAllocator, DriverError, _core, sim
from cumem_sleep.core.tuning import Tuning
from cumem_sleep.digest import digester as digest
from cumem_sleep.digest.digester import DeviceDigester
from cumem_sleep.digest.reference import CHUNK_BYTES, LANES, ROWS, Digest, sums_of

Bytes = npt.NDArray[np.uint8]
MASK = (1 << 64) - 1


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def flipped(content: Bytes, place: int, bit: int = 0) -> Bytes:
    changed = content.copy()
    changed[place] ^= 1 << bit
    return changed


def plain_sums(content: bytes) -> tuple[int, int]:
    """The definition, word by word, without NumPy."""
    content += bytes(-len(content) % 16)
    totals = [0, 0]
    for chain, (multiplier, shift, seed) in enumerate(
        [(0x9E3779B97F4A7C15, 32, 0xD6E8FEB86659FD93), (0xBF58476D1CE4E5B9, 29, 0xA0761D6478BD642F)]
    ):
        for chunk in range(-(-len(content) // CHUNK_BYTES)):
            words = memoryview(content[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]).cast("Q")
            for lane in range(LANES):
                state = (chunk * LANES + lane + 1) * seed & MASK
                for word in words[lane::LANES]:
                    taken = (word << 32 & MASK | word >> 32) if chain else word
                    state = (state ^ taken) * multiplier & MASK
                    state ^= state >> shift
                state = (state ^ state >> 33) * 0xFF51AFD7ED558CCD & MASK
                state = (state ^ state >> 33) * 0xC4CEB9FE1A85EC53 & MASK
                totals[chain] += state ^ state >> 33
    return totals[0] & MASK, totals[1] & MASK


def load_as_a_gpu(monkeypatch: pytest.MonkeyPatch, load: Callable[[int], None]) -> None:
    """Digests are not told that the driver is simulated, and `load` is what loads their kernel."""
    real = {**vars(_core), "driver_is_simulated": lambda: False, "load_digest_kernel": load}
    monkeypatch.setattr(digest, "_core", types.SimpleNamespace(**real))


class TestReference:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "00000000000000000000000000000000"),
            (b"\0", "61b5eb8c15080e057962b3d0a6e0df25"),
            (b"a", "c861b425198b6d3b078568116ed0b340"),
            (bytes(range(256)) * 16, "11117d196ed00dc1c888a89d7b25279c"),
            (b"\xff" * CHUNK_BYTES, "b184612eeadb4572ded469cc23d22881"),
            (np.arange(3 << 18, dtype="<u4").tobytes() + b"tail", "5e81b66449890739c82581ba30e7cce5"),
        ],
        ids=["nothing", "zero", "letter", "numbers", "one chunk", "four chunks"],
    )
    def test_known_answers(self, content: bytes, expected: str) -> None:
        assert str(digest_of(np.frombuffer(content, np.uint8))) == expected

    def test_is_what_its_definition_says(self) -> None:
        content = random_bytes(CHUNK_BYTES + 5)
        assert sums_of(content) == plain_sums(content.tobytes())

    def test_constants_have_the_documented_sizes(self) -> None:
        assert (LANES, ROWS, CHUNK_BYTES) == (2048, 64, 1 << 20)

    def test_leaves_its_input_alone(self) -> None:
        content = random_bytes(4096)
        content.setflags(write=False)
        before = content.copy()
        digest_of(content)
        assert (content == before).all()


class TestDetects:
    CONTENT = random_bytes(3 * CHUNK_BYTES + 13)

    @pytest.mark.parametrize(
        "place",
        [
            0,
            7,
            8,
            LANES * 8 - 1,
            LANES * 8,
            CHUNK_BYTES - 1,
            CHUNK_BYTES,
            2 * CHUNK_BYTES + 12345,
            3 * CHUNK_BYTES - 1,
            3 * CHUNK_BYTES,
            3 * CHUNK_BYTES + 12,
        ],
    )
    @pytest.mark.parametrize("bit", [0, 7])
    @pytest.mark.parametrize("sums", [sums_of, quick_sums])
    def test_a_flipped_bit(self, sums: Callable[[Bytes], tuple[int, int]], place: int, bit: int) -> None:
        before, after = sums(self.CONTENT), sums(flipped(self.CONTENT, place, bit))
        assert before[0] != after[0]
        assert before[1] != after[1]

    @pytest.mark.parametrize("sums", [sums_of, quick_sums])
    @pytest.mark.parametrize("unit", [8, 4096, LANES * 8, CHUNK_BYTES], ids=["words", "pages", "rows", "chunks"])
    def test_swapped(self, sums: Callable[[Bytes], tuple[int, int]], unit: int) -> None:
        content = self.CONTENT.copy()
        content[:unit], content[unit : 2 * unit] = self.CONTENT[unit : 2 * unit], self.CONTENT[:unit]
        before, after = sums(self.CONTENT), sums(content)
        assert before[0] != after[0]
        assert before[1] != after[1]

    @pytest.mark.parametrize("nbytes", [1, 8, 4096, CHUNK_BYTES - 1])
    def test_zeros_at_the_end(self, nbytes: int) -> None:
        """Padding is zeros; the length tells them apart."""
        content = self.CONTENT[:nbytes]
        digests = {digest_of(np.concatenate([content, np.zeros(more, np.uint8)])) for more in (0, 1, 2, 7, 8)}
        assert len(digests) == 5

    def test_equal_chunks_do_not_cancel(self) -> None:
        chunk = self.CONTENT[:CHUNK_BYTES]
        assert digest_of(np.tile(chunk, 2)) != digest_of(np.zeros(2 * CHUNK_BYTES, np.uint8))


class TestPieces:
    @pytest.mark.parametrize("chunks_at_once", [1, 2, 8])
    def test_do_not_depend_on_how_many_go_at_once(self, chunks_at_once: int) -> None:
        content = random_bytes(5 * CHUNK_BYTES + 100)
        assert sums_of(content, chunks_at_once=chunks_at_once) == sums_of(content)

    @pytest.mark.parametrize("sums", [sums_of, quick_sums])
    def test_add_up(self, sums: Callable[..., tuple[int, int]]) -> None:
        content = random_bytes(4 * CHUNK_BYTES + 77)
        whole = sums(content)
        for cut in (CHUNK_BYTES, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES):
            first, second = sums(content[:cut]), sums(content[cut:], cut // CHUNK_BYTES)
            added = tuple((one + two) & MASK for one, two in zip(first, second, strict=True))
            assert added == whole, cut


class TestDevice:
    """Of device memory: whatever computes it on this machine, the values are the reference's."""

    @pytest.mark.parametrize("pages", [1, 3])
    def test_equals_the_reference(self, allocator: CuMemAllocator, memory: Memory, pages: int) -> None:
        address = allocator.malloc(pages * PAGE)
        content = memory.fill_random(address, pages * PAGE)
        (segment,) = _core.segments()
        assert DeviceDigester(Tuning()).of([segment]) == {segment.id: digest_of(np.frombuffer(content, np.uint8))}

    def test_of_several_segments(self, allocator: CuMemAllocator, memory: Memory) -> None:
        expected = {}
        for pages in (2, 1, 3):
            address = allocator.malloc(pages * PAGE)
            content = memory.fill_random(address, pages * PAGE)
            expected[_core.segments()[-1].id] = digest_of(np.frombuffer(content, np.uint8))
        assert DeviceDigester(Tuning()).of(_core.segments()) == expected
        assert in_thread(lambda: DeviceDigester(Tuning()).of(_core.segments()[::-1])) == expected
        assert DeviceDigester(Tuning()).of([]) == {}

    @pytest.mark.sim
    def test_runs_on_the_cpu_for_a_simulated_device(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        digester = DeviceDigester(Tuning())
        digester.of(_core.segments())
        assert not digester.kernel_runs_on(0)

    @pytest.mark.sim
    @pytest.mark.parametrize(
        "call", ["cuStreamCreate", "cuMemHostRegister", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    )
    def test_failures_leave_nothing_behind(self, allocator: CuMemAllocator, call: str) -> None:
        allocator.malloc(PAGE)
        registered_bytes = sim.stats().registered_bytes
        sim.fail(call, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match=call) as raised:
            DeviceDigester(Tuning()).of(_core.segments())
        assert raised.value.call == call
        assert sim.stats().registered_bytes == registered_bytes

    def test_on_the_cpu_where_there_is_no_kernel(
        self,
        allocator: CuMemAllocator,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A kernel that cannot be loaded is replaced, once and with a warning; the values stay right."""

        def refuse(_: int) -> None:
            raise DriverError("cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU", "no such architecture", "")

        content = memory.fill_random(allocator.malloc(PAGE), PAGE)
        load_as_a_gpu(monkeypatch, refuse)
        (segment,) = _core.segments()
        digester = DeviceDigester(Tuning())
        expected = {segment.id: digest_of(np.frombuffer(content, np.uint8))}
        assert digester.of([segment]) == expected
        assert digester.of([segment]) == expected
        (record,) = caplog.records
        assert "no such architecture" in record.getMessage()
        assert "CUMEM_SLEEP_VERIFY" in record.getMessage()
        assert not digester.kernel_runs_on(0)

    @pytest.mark.sim
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_warm_up_runs_the_kernel(self, allocator: CuMemAllocator, fails: bool) -> None:
        allocator.malloc(PAGE)
        digest_by_the_kernel(allocator)
        if fails:
            sim.fail("cuLaunchKernel", error="CUDA_ERROR_INVALID_IMAGE")
        allocator._digester.warm_up(0)
        assert allocator._digester.kernel_runs_on(0) is not fails
        assert sim.stats().calls["cuLaunchKernel"] == 1


def test_text() -> None:
    assert str(Digest(0x123, 0xABC)) == "00000000000001230000000000000abc"
    assert Digest(1, 2) == Digest(1, 2) != Digest(2, 1)
