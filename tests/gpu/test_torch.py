"""PyTorch memory that sleeps: pools, CUDA graphs, kernels in flight, captures. Needs a real GPU.

What vLLM's tests hold its own allocator to is tested by these, on this layer: `benchmarks/upstream_tests.py`.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from snippets import snippet_at
from support import Memory, digest_of, fresh_allocator

from cumem_sleep import CuMemAllocator, InvalidState, OutOfDeviceMemory, _core
from cumem_sleep.core.copy_chooser import CopyChoice, CopyChooser
from cumem_sleep.digest.digester import DeviceDigester
from cumem_sleep.vllm import loaded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_pools")]
torch = pytest.importorskip("torch")

MIB = 1 << 20
PAGE_TABLES = 4 * MIB  # what the GPU needs to reach the pinned backups: 2 MiB for each GiB, on every GPU
SPIN_CYCLES = 400_000_000  # about 0.2 s on an H200


def random_tensor(nbytes: int, device: str = "cuda") -> Any:
    return torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64, device=device)


def free_bytes(device: int = 0) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def test_pool_memory_is_tagged_sleeps_and_wakes_at_its_address(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = random_tensor(512 * MIB)
    with allocator.use_memory_pool("kv_cache"):
        cache = random_tensor(256 * MIB)
    outside = random_tensor(64 * MIB)
    expected, address = weights.cpu(), weights.data_ptr()
    assert allocator.usage()["weights"].mapped_bytes == 512 * MIB
    assert allocator.usage()["kv_cache"].mapped_bytes == 256 * MIB

    before = free_bytes()
    report = allocator.sleep(level=1)
    assert report.freed_bytes == 768 * MIB
    assert report.copied_bytes == 512 * MIB
    assert free_bytes() - before >= 768 * MIB - PAGE_TABLES
    assert outside.sum().item() != 0  # memory outside the pools is untouched

    report = allocator.wake_up()
    assert report.verified_bytes == 512 * MIB
    assert weights.data_ptr() == address
    assert torch.equal(weights.cpu(), expected)
    assert allocator.sleep().copied_bytes == 0
    allocator.wake_up()
    assert torch.equal(weights.cpu(), expected)
    del weights, cache


@pytest.mark.parametrize("level", [1, 2])
def test_only_what_is_declared_is_lost_of_pytorchs_blocks(allocator: CuMemAllocator, level: int) -> None:
    tag = "kv_cache" if level == 1 else "weights"
    with allocator.use_memory_pool(tag):
        written = [torch.full((size,), 7.0, device="cuda") for size in (1, 3, 1 << 12, 3 << 20)]
        others = [torch.full((size,), 5.0, device="cuda") for size in (1, 3, 1 << 12, 3 << 20)]
        unused = [torch.full((1 << 12,), 9.0, device="cuda") for _ in range(8)]
        del unused
    drop = {each.data_ptr(): [(0, each.nbytes)] for each in written}
    for _ in range(2):
        report = allocator.sleep(level, drop=drop)
        in_use = sum(-(-each.nbytes // 16) * 16 for each in others)
        assert report.copied_bytes + report.clean_bytes == in_use, "no block that is free, none that was declared"
        filled = torch.full((256 << 20,), 3, dtype=torch.uint8, device="cuda")
        del filled
        torch.cuda.empty_cache()
        assert allocator.wake_up().verified_bytes == in_use
        assert all((each == 5).all() for each in others)
    for each in written:
        each.fill_(7)
    with allocator.use_memory_pool(tag):  # of an open pool more may be in use a moment later
        late = torch.full((1 << 12,), 5.0, device="cuda")
        allocator.sleep(level, drop=drop)
        allocator.wake_up()
        assert (late == 5).all()
    assert late.data_ptr() not in [each.data_ptr() for each in others]


def test_a_cuda_graph_replays_with_identical_results_across_sleep_and_wake(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with allocator.use_memory_pool("kv_cache"):
        state = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, weight, out=state)  # warm up cuBLAS outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, weight, out=state)
        y = state * 2
    graph.replay()
    torch.cuda.synchronize()
    expected = y.clone()
    for level in (1, 2):
        saved = weight.cpu()
        allocator.sleep(level)
        y.zero_()
        allocator.wake_up()
        if level == 2:
            weight.copy_(saved)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


def test_memory_of_graphs_captured_in_its_pool_sleeps_too(allocator: CuMemAllocator) -> None:
    x = torch.randn(1024, 1024, device="cuda")
    (x * x).relu().sum().item()
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        y = (x * x).relu() + 1  # no matrix product: PyTorch keeps cuBLAS workspaces for longer than the graph
    graph.replay()
    expected = y.clone()
    assert allocator.usage()["cudagraph"].bytes >= y.nbytes
    report = allocator.sleep(level=2)
    assert report.dropped_bytes == 0
    allocator.wake_up()
    assert torch.equal(y, expected)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    del graph, y
    allocator.release_pools()
    assert "cudagraph" not in allocator.usage()


def test_the_snippets_of_the_docs(allocator: CuMemAllocator) -> None:
    weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
    weight.sum().backward()
    names: dict[str, Any] = {"torch": torch, "allocator": allocator, "optimizer": torch.optim.Adam([weight])}
    exec(snippet_at("pytorch", "optimizer.step()").text, names)
    assert allocator.usage()["optimizer"].bytes >= 2 * weight.nbytes
    x = torch.randn(1024, 1024, device="cuda")
    names |= {"x": x, "step": lambda x: (x * x).relu()}
    exec(snippet_at("pytorch", "cudagraph_pool").text, names)
    names["graph"].replay()
    expected = (x * x).relu()
    assert torch.equal(names["y"], expected)
    assert allocator.sleep(level=2).dropped_bytes == 0
    allocator.wake_up()
    names["y"].zero_()
    names["graph"].replay()
    assert torch.equal(names["y"], expected)


def test_memory_that_is_free_on_leaving_the_pool_goes_back(allocator: CuMemAllocator) -> None:
    before = free_bytes()
    with allocator.use_memory_pool("weights"):
        kept = random_tensor(64 * MIB)
        temporary = random_tensor(512 * MIB)
        del temporary
    assert allocator.usage()["weights"].bytes == 64 * MIB
    assert before - free_bytes() <= 64 * MIB
    expected = kept.cpu()
    del kept
    torch.cuda.empty_cache()  # what is freed later goes back with PyTorch's own cache
    assert allocator.usage() == {}
    assert free_bytes() >= before
    assert expected.numel() == 64 * MIB // 8


def test_ordinary_memory_goes_back_and_pytorchs_cache_stays(allocator: CuMemAllocator) -> None:
    torch.cuda.empty_cache()
    cached = random_tensor(64 * MIB)
    del cached
    reserved, before = torch.cuda.memory_reserved(), free_bytes()
    with allocator.regions.outside():
        ordinary = random_tensor(512 * MIB)
        assert before - free_bytes() >= 512 * MIB
        del ordinary
    assert torch.cuda.memory_reserved() == reserved >= 64 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 64 * MIB


def test_a_tag_may_be_entered_again_and_pools_nest(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        a = random_tensor(32 * MIB)
        with allocator.use_memory_pool("kv_cache"):
            b = random_tensor(64 * MIB)
            with allocator.use_memory_pool("weights"):
                c = random_tensor(32 * MIB)
        d = random_tensor(128 * MIB)
    with allocator.use_memory_pool("weights"):
        e = random_tensor(32 * MIB)
    usage = allocator.usage()
    assert usage["weights"].bytes == 224 * MIB
    assert usage["kv_cache"].bytes == 64 * MIB
    expected = [t.cpu() for t in (a, c, d, e)]
    allocator.sleep(1)
    allocator.wake_up()
    assert all(torch.equal(t.cpu(), other) for t, other in zip((a, c, d, e), expected, strict=True))
    del b


def test_out_of_memory_in_the_pool_is_pytorchs_own_error(allocator: CuMemAllocator) -> None:
    total = torch.cuda.mem_get_info()[1]
    with allocator.use_memory_pool("weights"):
        kept = random_tensor(64 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total + MIB, dtype=torch.uint8, device="cuda")
        after = random_tensor(32 * MIB)  # the pool still works
    expected = kept.cpu(), after.cpu()
    allocator.sleep(1)
    allocator.wake_up()
    assert torch.equal(kept.cpu(), expected[0])
    assert torch.equal(after.cpu(), expected[1])


def test_a_wake_without_room_leaves_all_asleep_and_can_be_made_again(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = random_tensor(4096 * MIB)
    expected = weights.cpu()
    allocator.sleep(1)
    torch.cuda.empty_cache()
    blocker = torch.empty(free_bytes() - 2048 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.wake_up()
    assert caught.value.needed_bytes == 4096 * MIB
    assert allocator.usage()["weights"].mapped_bytes == 0
    del blocker  # cached by PyTorch: the wake itself makes that cache give way
    allocator.wake_up()
    assert torch.equal(weights.cpu(), expected)


@pytest.mark.parametrize("by_engine", [(False,), (False, True)])
def test_a_wake_by_the_copy_kernel(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, by_engine: tuple[bool, ...]
) -> None:
    """Several copies are in flight, also of memory that was registered again."""
    monkeypatch.setattr(CuMemAllocator.tuning, "worth_choosing_bytes", 0)
    monkeypatch.setattr(CuMemAllocator.tuning, "batch_bytes", 10 * MIB)
    monkeypatch.setattr(CuMemAllocator.tuning, "engine_batch_bytes", 10 * MIB)
    with allocator.use_memory_pool("weights"):
        weights = [random_tensor(nbytes) for nbytes in (2 * MIB, 64 * MIB, 22 * MIB, 150 * MIB)]
    assert 0 in allocator._paces.best_rates
    ways = itertools.cycle(by_engine)
    monkeypatch.setattr(CopyChooser, "record", lambda pace, *_: setattr(pace, "way", next(ways)))
    monkeypatch.setattr(CopyChooser, "next", lambda pace: CopyChoice(getattr(pace, "way", by_engine[0]), alone=False))
    expected = [tensor.cpu() for tensor in weights]
    for is_unpinned in (False, True, False):  # as after level 3
        allocator.sleep()
        if is_unpinned:
            allocator._store.memory.unpin()
        assert allocator.wake_up().verified_bytes >= 238 * MIB
        for tensor, before in zip(weights, expected, strict=True):
            assert torch.equal(tensor.cpu(), before)


def test_a_kernel_in_flight_at_sleep_is_waited_for(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.zeros(64 * MIB // 4, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        weights.fill_(7)
    allocator.sleep(1)
    allocator.wake_up()
    assert bool((weights == 7).all())


def test_a_kernel_in_flight_at_free_keeps_its_pages(allocator: CuMemAllocator) -> None:
    """Also on a side stream that PyTorch was told nothing about, as with memory of cudaMalloc."""
    stream = torch.cuda.Stream()
    done = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with allocator.use_memory_pool("weights"):
            weights = torch.zeros(64 * MIB // 4, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SPIN_CYCLES)
                weights.fill_(1)
                done.add_(weights[-1])
            del weights
        assert allocator.usage() == {}
    address = allocator.malloc(64 * MIB, "weights")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
    allocator.free(address)
    assert stream.query(), "free returned before the work that ran on the device had ended"
    torch.cuda.synchronize()  # an illegal address would show here
    assert done.item() == 3


@pytest.mark.parametrize("same_thread", [True, False])
def test_free_during_a_capture_waits_for_kernels_and_leaves_the_capture_valid(
    allocator: CuMemAllocator, same_thread: bool
) -> None:
    address = allocator.malloc(64 * MIB, "weights")
    x = torch.ones(1024, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
    errors: list[BaseException] = []

    def free() -> None:
        try:
            allocator.free(address)
        except BaseException as error:
            errors.append(error)

    with torch.cuda.graph(graph):
        y = x * 3
        if same_thread:
            free()
        else:
            thread = threading.Thread(target=free)
            thread.start()
            thread.join()
        y += 1
    assert errors == []
    assert allocator.usage() == {}
    graph.replay()
    assert y.sum().item() == 4 * 1024


def test_sleep_during_a_capture_is_refused_and_nothing_is_lost(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        weights = random_tensor(64 * MIB)
    expected = weights.cpu()
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(16, device="cuda")
    with torch.cuda.graph(graph):
        y = x + 1
        for call in (allocator.sleep, allocator.wake_up, lambda: allocator.discard("weights")):
            with pytest.raises(InvalidState, match="captur"):
                call()
    graph.replay()
    assert y.sum().item() == 32
    assert torch.equal(weights.cpu(), expected)


def test_a_segment_freed_during_its_copy_is_given_back_afterwards(allocator: CuMemAllocator) -> None:
    addresses = [allocator.malloc(512 * MIB, "weights") for _ in range(4)]
    thread = threading.Thread(target=allocator.sleep)
    thread.start()
    for address in addresses:
        allocator.free(address)
    thread.join()
    assert allocator.usage() == {}


def test_the_current_context_stays_as_it_was(allocator: CuMemAllocator) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    contexts: list[int | None] = []

    def run() -> None:
        current = ctypes.c_void_p()
        cuda.cuCtxGetCurrent(ctypes.byref(current))
        contexts.append(current.value)
        address = allocator.malloc(2 * MIB, "weights")
        allocator.sleep()
        allocator.wake_up()
        allocator.free(address)
        cuda.cuCtxGetCurrent(ctypes.byref(current))
        contexts.append(current.value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert contexts == [None, None]  # a new thread has no context, and still has none
    run()
    assert contexts[2] == contexts[3]


def test_the_gpu_digest_equals_the_reference(allocator: CuMemAllocator, memory: Memory) -> None:
    contents = {}
    for size in (2 * MIB, 20 * MIB, 34 * MIB, 2 * MIB):
        address = allocator.malloc(size, "weights")
        contents[address] = memory.fill_random(address, size)
    segments = {segment.address: segment for segment in _core.segments()}
    digester = DeviceDigester(CuMemAllocator.tuning)
    digests = digester.of(list(segments.values()))
    assert digester.kernel_runs_on(0)
    for address, content in contents.items():
        assert digests[segments[address].id] == digest_of(np.frombuffer(content, np.uint8))

    flipped = next(segment for segment in segments.values() if segment.bytes == 20 * MIB)
    content = contents[flipped.address]
    rng = np.random.default_rng()
    for place, bit in zip(rng.integers(len(content), size=20), rng.integers(8, size=20), strict=True):
        memory.write(flipped.address + int(place), bytes([content[place] ^ (1 << int(bit))]))
        assert digester.of([flipped])[flipped.id] != digests[flipped.id]
        memory.write(flipped.address + int(place), content[place : place + 1])
    assert digester.of([flipped]) == {flipped.id: digests[flipped.id]}


def test_cupy_reads_and_writes_the_very_bytes(allocator: CuMemAllocator) -> None:
    cupy = pytest.importorskip("cupy")
    from cumem_sleep import cupy_allocator

    cupy.cuda.set_allocator(cupy_allocator(tag="weights"))
    try:
        array = cupy.random.randint(0, 2**31, size=(4 * MIB,), dtype=cupy.int64)
        empty = cupy.empty(0)
        expected = cupy.asnumpy(array)
        segment = next(s for s in _core.segments() if s.address == array.data.ptr)
        assert segment.tag == "weights"
        tensor = torch.from_dlpack(array)
        assert tensor.data_ptr() == segment.address
        allocator.sleep(1)
        allocator.wake_up()
        assert np.array_equal(cupy.asnumpy(array), expected)
        assert np.array_equal(tensor.cpu().numpy(), expected)
        del array, tensor, empty, segment
        gc.collect()
    finally:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    cupy.get_default_memory_pool().free_all_blocks()
    assert allocator.usage() == {}


def test_200_cycles_leave_gpu_and_host_memory_flat(allocator: CuMemAllocator) -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    with allocator.use_memory_pool("weights"):
        weights = [random_tensor(32 * MIB) for _ in range(8)]
    with allocator.use_memory_pool("kv_cache"):
        cache = random_tensor(512 * MIB)
    expected = [w.cpu() for w in weights]
    levels: list[tuple[int, int, int]] = []
    for cycle in range(200):
        weights[cycle % 8] += 1
        expected[cycle % 8] += 1
        torch.cuda.synchronize()
        allocator.sleep(1)
        asleep = free_bytes()
        allocator.wake_up(["weights"])
        allocator.wake_up()
        levels.append((asleep, free_bytes(), resident_bytes()))
    assert all(torch.equal(w.cpu(), e) for w, e in zip(weights, expected, strict=True))
    settled = levels[20:]
    assert len({(asleep, awake) for asleep, awake, _ in settled}) == 1, "GPU memory is not flat"
    assert settled[-1][2] - settled[0][2] < 16 * MIB, "host memory is not flat"
    del cache


def test_peers_keep_their_access(allocator: CuMemAllocator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cuda = ctypes.CDLL("libcuda.so.1")

    class Location(ctypes.Structure):
        _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))

    class Access(ctypes.Structure):
        _fields_ = (("location", Location), ("flags", ctypes.c_int))

    with allocator.use_memory_pool("weights"):
        weights = random_tensor(64 * MIB, "cuda:0")
    torch.zeros(1, device="cuda:1")
    expected = weights.cpu()
    access = Access(Location(1, 1), 3)  # device 1 may read and write
    assert (
        cuda.cuMemSetAccess(
            ctypes.c_uint64(weights.data_ptr()), ctypes.c_size_t(64 * MIB), ctypes.byref(access), ctypes.c_size_t(1)
        )
        == 0
    )
    allocator.sleep(1)
    allocator.wake_up()
    flags = ctypes.c_ulonglong()
    location = Location(1, 1)
    assert cuda.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(location), ctypes.c_uint64(weights.data_ptr())) == 0
    assert flags.value == 3
    assert torch.equal(weights.cpu(), expected)


@pytest.mark.usefixtures("allocator")
def test_every_tensor_among_dropped_weights_shows_poison() -> None:
    poisoning = fresh_allocator(poison=True)
    with poisoning.use_memory_pool("weights"):
        weight = torch.full((4096,), 0x44, dtype=torch.uint8, device="cuda")
        other = torch.full((4096,), 0x55, dtype=torch.uint8, device="cuda")
    addresses = weight.data_ptr(), other.data_ptr()
    poisoning.sleep(offload_tags=())
    poisoning.wake_up()
    assert (weight.data_ptr(), other.data_ptr()) == addresses
    assert torch.all(weight == 0xFF)
    assert torch.all(other == 0xFF)


@pytest.mark.usefixtures("allocator")
def test_parameters_that_nobody_loads_again_are_told() -> None:
    allocator = fresh_allocator()
    model, draft = torch.nn.Module(), torch.nn.Module()
    with allocator.use_memory_pool("weights"):
        for module, name, size in ((model, "large", 30 << 20), (model, "one", 1), (draft, "fc", 12_345)):
            value = torch.randn(size, dtype=torch.bfloat16, device="cuda")
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    runner = SimpleNamespace(model=model, drafter=SimpleNamespace(model=draft))
    worker = SimpleNamespace(model_runner=runner)
    allocator.sleep(offload_tags=())
    with loaded.marking(worker):
        allocator.wake_up()
    assert loaded.not_loaded(worker) == "large, one, draft.fc"
    model.one.fill_(1.5)
    model.large[-1] = 1.5
    assert loaded.not_loaded(worker) == "draft.fc"
    draft.fc.zero_()
    assert loaded.not_loaded(worker) == ""
