"""Compressed backups on a real GPU: the codec's kernels, and PyTorch memory that sleeps compressed.

What a failure leaves behind, call by call, is tested on the simulated driver (tests/codec).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from support import BACKED_UP, DROPPED, host_bytes_of
from test_torch_processes import check_clean, run

from cumem_sleep import BackupMismatch, CuMemAllocator, _core
from cumem_sleep.codec import exponent as codec
from cumem_sleep.codec.codec import CHUNK_BYTES, Bytes, Code, parameters_of, rows
from cumem_sleep.codec.exponent import ExponentLayout
from cumem_sleep.codec.workspace import workspace_bytes
from cumem_sleep.core.copy_chooser import CopyChoice, CopyChooser

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_pools")]
torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the codec's kernels need Triton, which comes with PyTorch for CUDA")

MakeAllocator = Callable[..., CuMemAllocator]

MIB = 1 << 20
EXACT = 1.01
WORTHWHILE = 0.69  # of bf16 weights; their entropy is 0.66
BENCH_BYTES = workspace_bytes(
    CuMemAllocator.tuning, CuMemAllocator.tuning.slots, CuMemAllocator.tuning.slot_bytes[-1]
)  # the least memory that chunks are encoded in
# What the driver may take for its own while memory sleeps (page tables of pinned memory), less than any workspace.
SLACK = 16 * MIB
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}


@pytest.fixture(autouse=True)
def every_layout_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory there is of it."""
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_compiling_bytes", 0)


@pytest.fixture
def allocator(make_allocator: MakeAllocator) -> CuMemAllocator:
    return make_allocator(compress="auto")


def normal(dtype: Any, nbytes: int, device: str = "cuda") -> Any:
    """As weights are; those of one byte come with a scale that makes the most of their range."""
    values = torch.randn(nbytes // dtype.itemsize, device=device)
    return values.mul_(1.0 if dtype.itemsize == 1 else 0.02).to(dtype)


def bf16(nbytes: int, device: str = "cuda") -> Any:
    return normal(torch.bfloat16, nbytes, device)


def noise(nbytes: int, device: str = "cuda") -> Any:
    """As packed values of four bits, or compressed data."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def placed(allocator: CuMemAllocator, values: Sequence[Any], tag: str = "weights") -> list[Any]:
    """Copies in memory that sleeps. Computed there, they would leave segments that hold something else as well."""
    with allocator.use_memory_pool(tag):
        tensors = [torch.empty_like(value) for value in values]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    torch.cuda.synchronize()
    return tensors


def as_bytes(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


def bytes_of(tensors: Iterable[Any]) -> list[Any]:
    """On the host: compared there they take no memory on the GPU, and NaN equals itself."""
    return [as_bytes(tensor).cpu() for tensor in tensors]


def check_bytes(tensors: Sequence[Any], expected: Sequence[Any]) -> None:
    same = [torch.equal(as_bytes(t).cpu(), e) for t, e in zip(tensors, expected, strict=True)]
    assert all(same), same


def segment_of(tensor: Any) -> _core.Segment:
    address = tensor.data_ptr()
    (segment,) = (s for s in _core.segments() if s.address <= address < s.address + s.bytes)
    return segment


def layouts(allocator: CuMemAllocator, tensors: Iterable[Any]) -> list[str | None]:
    """The names of the layouts of their backups; None for what is stored as it is."""
    found = []
    for segment in map(segment_of, tensors):
        assert allocator._store.catalogue.get(segment) is not None
        encoding = allocator._store.catalogue.encoding_of(segment)
        found.append(encoding.code.layout.name if encoding is not None else None)
    return found


def host_bytes(allocator: CuMemAllocator) -> int:
    return sum(usage.host_bytes for usage in allocator.usage().values())


def total_bytes(*tensors: Any) -> int:
    return sum(int(tensor.nbytes) for tensor in tensors)


def states() -> set[_core.Segment.Sleep]:
    return {segment.sleep for segment in _core.segments()}


def free_bytes(device: int = 0) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def fill_device(leave_bytes: int) -> list[Any]:
    """Take all free memory but so much, and less than 20 MiB more, which is the least that PyTorch would take."""
    torch.cuda.empty_cache()
    taken = []
    while (size := free_bytes() - leave_bytes) >= 20 * MIB:
        size -= size // 1000  # page tables need some, too
        taken.append(torch.empty(size // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda"))
    return taken


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cumem_sleep"]


# The kernels


class Guarded:
    """GPU memory with a rim that no kernel may write to."""

    RIM_BYTES = 4096

    def __init__(self, nbytes: int, fill: int = 0) -> None:
        self._whole = torch.full((nbytes + 2 * self.RIM_BYTES,), 0xC5, dtype=torch.uint8, device="cuda")
        self.content = self._whole[self.RIM_BYTES : self.RIM_BYTES + nbytes]
        self.content.fill_(fill)

    @property
    def address(self) -> int:
        return int(self.content.data_ptr())

    def read(self) -> Bytes:
        rims = self._whole[: self.RIM_BYTES], self._whole[self._whole.numel() - self.RIM_BYTES :]
        assert all(bool((rim == 0xC5).all()) for rim in rims), "written outside"
        content: Bytes = self.content.cpu().numpy()
        return content


class OnGpu:
    """Kernels at work on chunks, each with its own code, one launch for all."""

    def __init__(self, layout: ExponentLayout, codes: Sequence[Code]) -> None:
        from cumem_sleep.codec import exponent_kernel as codec_kernel

        self._kernel = codec_kernel
        self._layout = layout
        self._codes = codes

    def count(self, content: Bytes) -> list[int]:
        chunks, totals = torch.from_numpy(content).cuda(), Guarded(4 * len(self._codes))
        targets = totals.address + 4 * np.arange(len(self._codes))
        table = self._table(self._chunk_addresses(chunks.data_ptr()), targets, np.zeros(len(self._codes), np.int64))
        self._kernel.count(self._layout, table.data_ptr(), len(self._codes))
        counted: list[int] = totals.read().view(np.uint32).tolist()
        return counted

    def encode(self, content: Bytes, sizes: Sequence[int]) -> tuple[list[Bytes], list[int]]:
        """Each encoded chunk, and how many bytes it would take."""
        chunks, stored, counters = torch.from_numpy(content).cuda(), Guarded(sum(sizes)), Guarded(4 * len(sizes))
        table = self._table(self._chunk_addresses(chunks.data_ptr()), stored.address + starts_of(sizes), sizes)
        self._kernel.encode(self._layout, table.data_ptr(), counters.address, len(sizes))
        counted = counters.read().view(np.uint32) + np.uint32(self._layout.header_bytes)
        return cut(stored.read(), sizes), counted.tolist()

    def decode(self, stored: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """Of each the first `sizes` bytes are valid."""
        starts = starts_of([-(-part.size // 16) * 16 for part in stored])
        source, chunks = Guarded(int(starts[-1]) + stored[-1].size), Guarded(len(stored) * CHUNK_BYTES, 0xEE)
        for start, part in zip(starts.tolist(), stored, strict=True):
            source.content[start : start + part.size] = torch.from_numpy(part.copy()).cuda()
        table = self._table(source.address + starts, self._chunk_addresses(chunks.address), sizes)
        self._kernel.decode(self._layout, table.data_ptr(), len(stored))
        return cut(chunks.read(), [CHUNK_BYTES] * len(stored))

    def _chunk_addresses(self, first: int) -> Any:
        return first + CHUNK_BYTES * np.arange(len(self._codes))

    def _table(self, sources: Any, targets: Any, sizes: Any) -> Any:
        return torch.from_numpy(rows(parameters_of(self._codes), sources, targets, sizes).view(np.int64)).cuda()


def starts_of(sizes: Sequence[int]) -> Any:
    return np.cumsum(sizes) - sizes


def cut(content: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    return np.split(content, np.cumsum(sizes)[:-1])


def code_of(layout: ExponentLayout, chunk: Bytes, *, worst: bool = False) -> Code:
    """Its nine most frequent symbols, or its least frequent ones."""
    symbols = (chunk.view(layout.dtype) << 1) >> (layout.value_bits - layout.symbol_bits)
    order = np.argsort(-np.bincount(symbols, minlength=1 << layout.symbol_bits), kind="stable").tolist()
    return Code(layout, bytes(order[::-1][:9] if worst else order[:9]))


def kinds_of_chunks(layout: ExponentLayout) -> dict[str, Bytes]:
    random = np.random.default_rng()
    exponent = ((1 << layout.symbol_bits) - 1) << (layout.raw_bits - 1)
    usual = bytes_of([normal(DTYPES[layout.name], CHUNK_BYTES)])[0].numpy()
    other = random.integers(0, 256, CHUNK_BYTES, np.uint8)
    some = usual.view(layout.dtype).copy()
    which = random.integers(0, 8, some.size)
    some[which == 0] |= layout.dtype.type(exponent)  # NaN, with any payload
    some[which == 1] = exponent  # infinite, of both signs
    some[which == 2] = exponent | 1 << (layout.value_bits - 1)
    return {
        "normal": usual,
        "random": other,
        "zeros": np.zeros(CHUNK_BYTES, np.uint8),
        "some NaN and infinities": some.view(np.uint8),
        "all NaN": (other.view(layout.dtype) | layout.dtype.type(exponent)).view(np.uint8),
        "half random": np.concatenate([usual[: usual.size // 2], other[: usual.size // 2]]),
    }


def blocks_of(layout: ExponentLayout, stored: Bytes, reference: Bytes) -> list[tuple[bytes, bytes]]:
    """What lies in `stored` where its header says that a block is, beside that block of `reference`, for all blocks."""
    here, there = (part[: 4 * layout.blocks_per_chunk].view("<u4").astype(np.int64) for part in (stored, reference))
    sizes = np.diff(there, append=reference.size)  # whose blocks are in order
    spans = zip(here.tolist(), there.tolist(), sizes.tolist(), strict=True)
    return [(stored[a : a + n].tobytes(), reference[b : b + n].tobytes()) for a, b, n in spans]


@pytest.mark.parametrize("layout", codec.LAYOUTS, ids=[layout.name for layout in codec.LAYOUTS])
class TestKernels:
    def test_equal_the_reference(self, layout: ExponentLayout) -> None:
        """But for the order of the blocks in a chunk, which is the GPU's."""
        kinds = kinds_of_chunks(layout)
        best, worst = (code_of(layout, kinds["normal"], worst=worst) for worst in (False, True))
        names = [*kinds, "normal", "zeros"]
        codes = [best] * len(kinds) + [worst] * 2
        content = np.concatenate([kinds[name] for name in names])
        expected = [int(codec.chunk_bytes(code, kinds[name])[0]) for code, name in zip(codes, names, strict=True)]
        assert expected[0] < 0.9 * CHUNK_BYTES < CHUNK_BYTES < expected[-2]
        gpu = OnGpu(layout, codes)
        assert gpu.count(content) == expected

        stored, counted = gpu.encode(content, expected)
        assert counted == expected
        references = [codec.encode(code, kinds[name]) for code, name in zip(codes, names, strict=True)]
        for name, code, part, reference in zip(names, codes, stored, references, strict=True):
            assert part.size == reference.size
            assert all(ours == theirs for ours, theirs in blocks_of(layout, part, reference)), name
            assert np.array_equal(codec.decode(code, part, [part.size]), kinds[name]), name
        for source in (stored, references):
            for name, decoded in zip(names, gpu.decode(source, expected), strict=True):
                assert np.array_equal(decoded, kinds[name]), name

    def test_write_nothing_of_what_no_longer_fits(self, layout: ExponentLayout) -> None:
        kinds = kinds_of_chunks(layout)
        code = code_of(layout, kinds["normal"])
        names = ("normal", "half random", "normal")
        expected = [int(codec.chunk_bytes(code, kinds[name])[0]) for name in names]
        content = np.concatenate([kinds[name] for name in names])
        gpu = OnGpu(layout, [code] * 3)
        for too_small in (expected[0] - 16, layout.header_bytes, 16, 0):
            sizes = [too_small, *expected[1:]]
            stored, counted = gpu.encode(content, sizes)
            assert counted == expected  # so the first is known to be bad
            assert stored[0].any() == (too_small > layout.header_bytes)
        for name, part in zip(names[1:], stored[1:], strict=True):
            assert np.array_equal(codec.decode(code, part, [part.size]), kinds[name])

    def test_decode_damaged_bytes_as_the_reference_does(self, layout: ExponentLayout) -> None:
        random = np.random.default_rng()
        chunk = kinds_of_chunks(layout)["half random"]
        code = code_of(layout, chunk)
        whole = codec.encode(code, chunk)
        header_bytes = 4 * layout.blocks_per_chunk
        noise = random.integers(0, 256, whole.size, np.uint8)
        noise[:header_bytes] = whole[:header_bytes]  # else hardly a block would begin within the chunk
        offsets = whole.copy()
        offsets[:16].view(np.uint32)[:] = 0xFFFFFFFF, 0x7FFFFFF1, 0x80000000, whole.size - 16
        last = whole.copy()
        last[int(whole[:header_bytes].view(np.uint32)[-1]) :] = 0xFF  # passes on more than there is room for
        cases = [(damaged, whole.size) for damaged in (noise, offsets, last)]
        cases += [(whole, size) for size in (0, 17, whole.size // 2, whole.size - 1)]
        damaged, sizes = [content for content, _ in cases], [size for _, size in cases]
        decoded = OnGpu(layout, [code] * len(cases)).decode(damaged, sizes)
        for number, (content, size) in enumerate(cases):
            assert np.array_equal(decoded[number], codec.decode(code, content[:size], [size])), number


# Sleep and wake


def test_weights_take_two_thirds_and_a_graph_of_before_replays(allocator: CuMemAllocator) -> None:
    weights = placed(allocator, [bf16(32 * MIB).view(4096, 4096) for _ in range(16)])
    (cache,) = placed(allocator, [noise(64 * MIB)], "kv_cache")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)

    def model() -> Any:
        y = x
        for weight in weights:
            y = torch.mm(y, weight)
        return y

    model()  # warms up cuBLAS outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model()
    graph.replay()
    expected, result = bytes_of(weights), bytes_of([y])
    assert bool(y.isfinite().all())
    assert result[0].any()
    addresses = [weight.data_ptr() for weight in weights]
    for turn in range(2):
        torch.cuda.empty_cache()
        before = free_bytes()
        slept = allocator.sleep(level=1)
        assert (slept.copied_bytes, slept.clean_bytes) == ((512 * MIB, 0) if turn == 0 else (0, 512 * MIB))
        assert slept.freed_bytes == 576 * MIB
        assert free_bytes() - before >= 576 * MIB - SLACK
        assert layouts(allocator, weights) == ["bf16"] * 16
        woke = allocator.wake_up()
        assert woke.verified_bytes == woke.restored_bytes == 512 * MIB
        assert slept.stored_bytes == (woke.stored_bytes if turn == 0 else 0)
        assert 0.6 * 512 * MIB < woke.stored_bytes <= WORTHWHILE * 512 * MIB
        assert woke.stored_bytes <= host_bytes(allocator) <= EXACT * woke.stored_bytes
        assert free_bytes() >= before - SLACK, "the kernels' memory was not given back"
        assert [weight.data_ptr() for weight in weights] == addresses
        check_bytes(weights, expected)
        y.zero_()
        graph.replay()
        check_bytes([y], result)
    assert cache.numel() == 64 * MIB
    del graph, y


def test_of_all_kinds_at_once(allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wake copies by the kernel what has been unpinned, as after level 3."""
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
    large = [normal(dtype, 32 * MIB) for dtype in DTYPES.values()]
    large.append(noise(32 * MIB))
    large.append(torch.randint(0, 50_000, (4 * MIB,), device="cuda"))
    half = bf16(32 * MIB)
    as_bytes(half)[: 16 * MIB] = noise(16 * MIB)
    large.append(half)
    odd = [
        torch.randn(3, 5, 7, device="cuda"),
        torch.randn(1, device="cuda", dtype=torch.float64),
        torch.randn(1_000_003, device="cuda").bfloat16(),
        torch.randint(0, 2, (777,), device="cuda").bool(),
        torch.randn(6_000_001, device="cuda"),
        torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device="cuda"),
    ]
    weights = placed(allocator, large)
    buffers = placed(allocator, odd, "runtime")
    expected = bytes_of(weights + buffers)
    del large, odd, half
    names = [*DTYPES, None]
    assert 0 in allocator._paces.best_rates
    for by_kernel in (False, True):
        slept = allocator.sleep(1)
        assert DROPPED not in states()
        assert layouts(allocator, weights)[: len(names)] == names
        raw = segment_of(weights[len(names) - 1])
        assert host_bytes_of(allocator, raw) == raw.bytes == 32 * MIB
        assert host_bytes_of(allocator, segment_of(weights[0])) <= EXACT * WORTHWHILE * 32 * MIB
        if by_kernel:
            monkeypatch.setattr(CopyChooser, "next", lambda _: CopyChoice(by_engine=False, alone=False))
            monkeypatch.setattr(CopyChooser, "record", lambda *_: None)
            allocator._store.memory.unpin()
        woke = allocator.wake_up()
        assert woke.verified_bytes == slept.copied_bytes + slept.clean_bytes == allocator.get_current_usage()
        assert woke.stored_bytes <= host_bytes(allocator) <= EXACT * woke.stored_bytes
        check_bytes(weights + buffers, expected)
    assert slept.copied_bytes == 0
    allocator.sleep(2)  # `runtime` alone is backed up
    allocator.wake_up()
    check_bytes(buffers, expected[len(weights) :])


# Prepare


def test_prepare_beside_running_work(allocator: CuMemAllocator) -> None:
    weights = placed(allocator, [bf16(32 * MIB).view(4096, 4096) for _ in range(12)])
    others = placed(allocator, [normal(torch.float8_e4m3fn, 32 * MIB), noise(32 * MIB)])
    expected = bytes_of(weights + others)
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        y = x
        for weight in weights:
            y = torch.mm(y, weight)
        return y

    result = bytes_of([step()])
    preparation = allocator.prepare()
    steps = 0
    while preparation.running:
        check_bytes([step()], result)
        steps += 1
    assert preparation.error is None
    assert steps > 0
    assert preparation.wanted_bytes == allocator.usage()["weights"].backed_up_bytes == 14 * 32 * MIB
    prepared_bytes = host_bytes(allocator)
    slept = allocator.sleep()
    assert (slept.copied_bytes, slept.clean_bytes) == (0, 14 * 32 * MIB)
    assert layouts(allocator, weights + others) == ["bf16"] * 12 + ["e4m3", None]
    woke = allocator.wake_up()
    assert woke.stored_bytes <= prepared_bytes <= EXACT * woke.stored_bytes
    assert prepared_bytes == host_bytes(allocator)
    check_bytes(weights + others, expected)
    check_bytes([step()], result)


def test_prepare_while_weights_change(allocator: CuMemAllocator) -> None:
    """Of before, of after, or of both: whatever it has then, the sleep finds out. Sizes change as well."""
    contents = [bf16(32 * MIB), noise(32 * MIB).view(torch.bfloat16)]
    weights = placed(allocator, contents[:1] * 8)
    turn = turns_while_running = 0
    for _ in range(2):
        preparation = allocator.prepare()
        is_running = True
        while is_running:
            turn += 1
            for weight in weights[::2]:
                weight.copy_(contents[turn % 2])
            torch.cuda.synchronize()
            is_running = preparation.running
            turns_while_running += is_running
        assert preparation.error is None
        expected = bytes_of(weights)
        slept = allocator.sleep()
        assert slept.copied_bytes <= 4 * 32 * MIB
        assert slept.copied_bytes + slept.clean_bytes == 8 * 32 * MIB
        allocator.wake_up()
        check_bytes(weights, expected)
    assert turns_while_running > 0  # in the first pass, which has all to copy


def test_prepare_leaves_a_capture_valid(make_allocator: MakeAllocator) -> None:
    allocator = make_allocator(compress="auto", prepare_bytes_per_second=500_000_000)
    weights = placed(allocator, [bf16(32 * MIB) for _ in range(8)])
    expected = bytes_of(weights)
    x = torch.randn(1024, device="cuda").round_()
    (x + 0).add_(1)
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), 0
    preparation = allocator.prepare()
    with torch.cuda.graph(graph):
        y = x + 0
        while preparation.running:
            y.add_(1)
            captured += 1
            time.sleep(0.001)
    assert preparation.error is None
    assert captured > 10
    for _ in range(2):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x + captured)
        assert allocator.sleep().copied_bytes == 0
        assert layouts(allocator, weights) == ["bf16"] * 8
        allocator.wake_up()
        check_bytes(weights, expected)
    del graph, y


def test_prepare_begins_beside_a_capture_of_another_thread() -> None:
    """In a new process: of fp16 weights, whose kernels are loaded meanwhile."""
    result = run(
        """
import threading
import torch
from cumem_sleep import CuMemAllocator, _core
allocator = CuMemAllocator.get_instance()
values = torch.randn(32 << 20, device="cuda").mul_(0.02).half()
with allocator.use_memory_pool("weights"):
    weights = torch.empty_like(values)
weights.copy_(values)
expected = values.cpu()
x = torch.randn(1024, device="cuda")
assert (x * 3 + 1).numel() == 1024
torch.cuda.synchronize()
graph, begun, over, results = torch.cuda.CUDAGraph(), threading.Event(), threading.Event(), []
def capture():
    with torch.cuda.graph(graph):
        results.append(x * 3)
        begun.set()
        over.wait(60)
        results.append(results[0] + 1)
thread = threading.Thread(target=capture)
thread.start()
assert begun.wait(60)
try:
    preparation = allocator.prepare()
    assert preparation.wait(60)
finally:
    over.set()
    thread.join()
assert preparation.error is None, preparation.error
graph.replay()
torch.cuda.synchronize()
assert torch.equal(results[1], x * 3 + 1)
report = allocator.sleep()
assert report.copied_bytes == 0, report
(segment,) = _core.segments()
encoding = allocator._store.catalogue.encoding_of(segment)
assert encoding is not None and encoding.code.layout.name == "fp16", encoding
allocator.wake_up()
assert torch.equal(weights.cpu().view(torch.int16), expected.view(torch.int16))
""",
        CUMEM_SLEEP_COMPRESS="auto",
    )
    check_clean(result)


# The device is full


def test_on_a_full_device_backups_are_stored_as_they_are(
    allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nowhere for kernels to encode, which is said; and nothing to decode."""
    weights = placed(allocator, [bf16(64 * MIB) for _ in range(4)])
    (cache,) = placed(allocator, [noise(64 * MIB)], "kv_cache")
    allocator.sleep(offload_tags=("weights", "kv_cache"))  # takes what the driver takes once, for kernels
    allocator.wake_up()
    allocator.release_backups()
    assert warnings_of(caplog) == []
    taken = fill_device(leave_bytes=8 * MIB)
    assert free_bytes() < BENCH_BYTES
    before = free_bytes()
    for _ in range(2):
        weights[1].neg_()
        expected = bytes_of(weights)
        slept = allocator.sleep(1)
        assert slept.stored_bytes == slept.copied_bytes > 0
        assert slept.dropped_bytes == cache.nbytes
        assert layouts(allocator, weights) == [None] * 4
        woke = allocator.wake_up()
        assert woke.verified_bytes == total_bytes(*weights)
        assert abs(free_bytes() - before) <= SLACK
        check_bytes(weights, expected)
    assert {warning.split(":")[0] for warning in warnings_of(caplog)} == {
        "device 0 has no memory left for the codec to work in"
    }
    assert taken


def test_wake_with_room_for_the_weights_alone(allocator: CuMemAllocator) -> None:
    """The CPU decodes."""
    weights = placed(allocator, [bf16(64 * MIB), noise(64 * MIB), normal(torch.float16, 64 * MIB)])
    expected = bytes_of(weights)
    allocator.sleep()
    assert layouts(allocator, weights) == ["bf16", None, "fp16"]
    allocator._store.memory.unpin()  # as for level 3
    taken = fill_device(leave_bytes=total_bytes(*weights) + 8 * MIB)
    assert free_bytes() < total_bytes(*weights) + BENCH_BYTES
    assert allocator.wake_up().verified_bytes == total_bytes(*weights)
    check_bytes(weights, expected)
    assert taken


# Damage


def test_a_flipped_bit_in_a_backup_is_found(allocator: CuMemAllocator) -> None:
    weights = placed(allocator, [bf16(20 * MIB) for _ in range(3)])
    expected = bytes_of(weights)
    allocator.sleep()
    asleep = free_bytes()
    damaged = segment_of(weights[1])
    backup = allocator._store.catalogue.get(damaged)
    assert backup is not None
    assert backup.encoding is not None
    layout, sizes = backup.encoding.code.layout, backup.encoding.sizes
    (extent,) = backup.extents
    content = np.frombuffer(memoryview(extent), np.uint8)
    places = {
        "header, by 4096 bytes": (1, 0x10),
        "header, beyond the chunk": (3, 0x80),
        "plane": (layout.header_bytes + 7, 0x01),
        "level 0": (layout.header_bytes + layout.fixed_bytes - 1, 0x40),
        "last chunk": (int(sizes[:-1].sum()) + layout.header_bytes, 0x08),
    }
    for name, (place, bit) in places.items():
        content[place] ^= bit
        with pytest.raises(BackupMismatch) as raised:
            allocator.wake_up()
        assert f"0x{damaged.address:x}" in raised.value.segment, name
        assert raised.value.expected == str(backup.digest)
        assert states() == {BACKED_UP}
        assert abs(free_bytes() - asleep) <= SLACK
        content[place] ^= bit
    allocator.wake_up()
    check_bytes(weights, expected)
