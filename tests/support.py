"""What several test modules share: device memory through the driver, a clean slate, processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from forking import FOLDER, PATH, QUIET, Forked

import cumem_sleep
from cumem_sleep import CuMemAllocator, CumemSleepError, Settings, _core, host_facts, sim
from cumem_sleep.backups.writer import BackupWriter
from cumem_sleep.core.pinned import node_of
from cumem_sleep.digest.reference import CHUNK_BYTES, Digest, digests_from, sums_of

MIB = 1 << 20
PAGE = 2 * MIB  # the granularity of device memory
DEVICE_BYTES = 256 * MIB
HANGS_S = 120.0  # what takes longer hangs; on a busy machine much takes long

_ODD = np.random.default_rng(0).integers(0, 1 << 63, CHUNK_BYTES // 8, np.uint64) * np.uint64(2) + np.uint64(1)
DRIVER = os.environ["CUMEM_SLEEP_DRIVER"]  # conftest.py sees to it
SIMULATED = DRIVER == "sim"
if SIMULATED:
    CuMemAllocator.tuning.table_bytes_per_gib = 0  # that driver takes none, and tests fill its devices exactly

AWAKE, BACKED_UP, DROPPED = _core.Segment.Sleep.AWAKE, _core.Segment.Sleep.BACKED_UP, _core.Segment.Sleep.DROPPED

_LIBC = ctypes.CDLL(None)

if TYPE_CHECKING:
    import pytest  # scripts are slow enough to start without it

_Result = TypeVar("_Result")


class Memory:
    """Device memory, read and written by copies on a stream: works on the simulated driver and on a GPU alike."""

    BOUNCE_BYTES = 4 * MIB

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._block: _core.HostBlock | None = None
        self._streams: dict[int, _core.CopyStream] = {}

    @property
    def registered_bytes(self) -> int:
        """Pinned host memory that is this object's own."""
        return self._block.bytes if self._block else 0

    def close(self) -> None:
        """Give back what the copies need; the next copy takes it again."""
        self._streams.clear()
        self._block = None

    def read(self, address: int, nbytes: int, device: int = 0) -> bytes:
        stream, block, bounce = self._bounce(device)
        content = bytearray()
        for start in range(0, nbytes, block.bytes):
            size = min(block.bytes, nbytes - start)
            stream.to_host(block, 0, address + start, size)
            stream.synchronize()
            content += bounce[:size].tobytes()
        return bytes(content)

    def write(self, address: int, data: bytes | npt.NDArray[np.uint8], device: int = 0) -> None:
        stream, block, bounce = self._bounce(device)
        content = np.frombuffer(data, np.uint8)
        for start in range(0, content.size, block.bytes):
            piece = content[start : start + block.bytes]
            bounce[: piece.size] = piece
            stream.to_device(address + start, block, 0, piece.size)
            stream.synchronize()

    def fill_random(self, address: int, nbytes: int, device: int = 0) -> bytes:
        """Write random bytes; returns them."""
        content = random_bytes(nbytes, self._random)
        self.write(address, content, device)
        return content

    def _bounce(self, device: int) -> tuple[_core.CopyStream, _core.HostBlock, npt.NDArray[np.uint8]]:
        if self._block is None:
            block = _core.HostBlock(self.BOUNCE_BYTES, -1)
            block.prefault(0, block.bytes)
            block.pin(device)
            self._block = block
        stream = self._streams.get(device) or self._streams.setdefault(device, _core.CopyStream(device))
        return stream, self._block, np.frombuffer(memoryview(self._block), np.uint8)


def fresh_allocator(**settings: object) -> CuMemAllocator:
    """A new allocator; on the simulated driver, one device of `DEVICE_BYTES` and no injected failures."""
    return CuMemAllocator(Settings(driver=DRIVER, **settings))  # type: ignore[arg-type]


@functools.cache
def _noise() -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(32 * MIB))


def random_bytes(nbytes: int, random: np.random.Generator) -> bytes:
    """Cut from bytes that were made once, at a random place: making them takes far longer."""
    if nbytes > len(_noise()) // 2:
        return random.bytes(nbytes)
    start = int(random.integers(len(_noise()) - nbytes))
    return bytes(_noise()[start : start + nbytes])


def bf16_weights(nbytes: int, random: np.random.Generator, scale: float = 0.02) -> bytes:
    """Normal values as bf16, the last byte cut off if need be."""
    values = random.standard_normal(-(-nbytes // 2), np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes]


@functools.cache
def _weights() -> bytes:
    return bf16_weights(PAGE + 8 * MIB, np.random.default_rng(0))


def weights_of(pages: int, seed: int) -> bytes:
    """Each page is of the same values, which take long to make, but from another place on: no two are alike."""
    starts = 2 * np.random.default_rng(seed).integers(0, 4 * MIB, pages)
    return b"".join(_weights()[start : start + PAGE] for start in starts)


_held_before: tuple[int, ...] = (0, 0, 0, 0, 0)


def write_safetensors(path: pathlib.Path, header: object, data: bytes) -> pathlib.Path:
    """A safetensors file, whatever sense its header makes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def reset_simulation() -> None:
    """One device, no injected failures; notes what is held, so that one test's leak is not the next one's."""
    global _held_before
    if SIMULATED:
        sim.reset()
        for segment in _core.segments():  # of a test that failed half-way
            with contextlib.suppress(CumemSleepError):
                _core.free(segment.address)
        CuMemAllocator.instance = None
        sim.configure(device_bytes=DEVICE_BYTES, devices=1)
        _held_before = _held()


def around_copies(
    patch: pytest.MonkeyPatch, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None
) -> None:
    """Have these called before the first copy of a sleep begins, and when the last has ended."""
    add, finish, begun = BackupWriter.add, BackupWriter.finish, list[bool]()

    def watched_add(self: BackupWriter, *arguments: Any) -> Any:
        if before is not None and not begun:
            begun.append(True)
            before()
        return add(self, *arguments)

    def watched_finish(self: BackupWriter) -> list[_core.Segment]:
        filled = finish(self)
        if after is not None:
            after()
        return filled

    patch.setattr(BackupWriter, "add", watched_add)
    patch.setattr(BackupWriter, "finish", watched_finish)


def free_everything() -> None:
    """Free every segment, and see that neither the driver nor the host keeps anything."""
    allocator = CuMemAllocator.instance
    if allocator is None:
        return
    if SIMULATED:
        sim.reset()
    try:
        allocator._stop_preparing()
        held = _held_by_torch()
        for segment in _core.segments():
            if segment.address not in held:
                allocator.free(segment.address)
        assert not held, f"PyTorch still has {len(held)} segments in use: the test left tensors behind"
        if _core.driver_is_open():
            assert _core.reclaim() == 0
            allocator._store.memory.settle()  # much goes in a thread
        assert allocator._store.memory.bytes == 0
        if SIMULATED:
            if _held() != _held_before:
                gc.collect()  # exceptions may hold frames, and these what they worked with
            ends = time.monotonic() + 10
            while _held() != _held_before and time.monotonic() < ends:  # a vault's thread may still give back
                time.sleep(0.01)
            assert _held() == _held_before, "left behind: handles, mapped, reserved, registered, device bytes"
    finally:
        CuMemAllocator.instance = None


def _held_by_torch() -> set[int]:
    """Addresses of the segments that PyTorch's caching allocator will free itself, once their tensors are gone.

    Freed under it, they would end the process: it takes an error of its free hook for fatal.
    """
    torch = sys.modules.get("torch")
    if SIMULATED or torch is None or not torch.cuda.is_initialized():
        return set()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ours = {segment.address for segment in _core.segments()}
    return ours & {segment["address"] for segment in torch.cuda.memory_snapshot() if segment["active_size"]}


def _held() -> tuple[int, ...]:
    stats = sim.stats()
    free_bytes, total_bytes = _core.memory_info(0) if _core.driver_is_open() else (0, 0)
    held = (stats.live_handles, stats.mapped_bytes, stats.reserved_bytes, stats.registered_bytes)
    return (*held, total_bytes - free_bytes)


def forget_devices() -> None:
    """So that they are asked once more, and make their streams anew."""
    node_of.cache_clear()
    for device in range(_core.device_count()):
        _core.release_idle(device)


def host_bytes_of(allocator: CuMemAllocator, segment: _core.Segment) -> int:
    """How much host memory its backup takes, complete or not."""
    backup = allocator._store.catalogue.of(segment)
    return backup.bytes if backup else 0


def digest_of(data: npt.ArrayLike) -> Digest:
    """By the reference: of the bytes of an array (any dtype, any length), on the CPU."""
    content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return digests_from(np.array([sums_of(content)], np.uint64), [content.size])[0]


def quick_sums(content: npt.NDArray[np.uint8], first_chunk: int = 0) -> tuple[int, int]:
    """In place of `digest.sums_of`: quick, and words that changed places change it, too."""
    if padding := -content.size % 8:
        content = np.concatenate((content, np.zeros(padding, np.uint8)))
    words, in_chunk = content.view(np.uint64), CHUNK_BYTES // 8
    whole = words[: words.size // in_chunk * in_chunk].reshape(-1, in_chunk)
    chunks = np.einsum("ij,j->i", whole, _ODD)
    if (rest := words[whole.size :]).size:
        chunks = np.append(chunks, np.einsum("j,j->", rest, _ODD[: rest.size]))
    numbers = np.arange(first_chunk, first_chunk + len(chunks), dtype=np.uint64)
    high, low = (chunks * (2 * numbers + np.uint64(odd)) for odd in (1, 3))
    return int(high.sum(dtype=np.uint64)), int(low.sum(dtype=np.uint64))


def ample_host_memory(patch: pytest.MonkeyPatch) -> None:
    """Where it is not the question how much is left: the answer is in hundreds of files."""
    patch.setattr(host_facts, "mem_available_bytes", lambda **_: None)
    patch.setattr(host_facts, "cgroup_available_bytes", lambda **_: None)


def digest_by_the_kernel(allocator: CuMemAllocator) -> None:
    """As on a GPU; without this, digests of simulated memory are computed when they are asked for."""
    allocator._digester._kernel_runs = dict.fromkeys(range(8), True)


@contextlib.contextmanager
def raises(error_type: type[BaseException], *words: str) -> Iterator[None]:
    """`pytest.raises` for scripts, which are slow enough to start without pytest."""
    try:
        yield
    except error_type as error:
        text = str(error)
    else:
        raise AssertionError(f"no {error_type.__name__}")
    assert all(word in text for word in words), text


def in_thread(work: Callable[[], _Result]) -> _Result:
    """The result of `work` on another thread, or what it raised."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive(), "the thread hangs"
    if errors:
        raise errors[0]
    return results[0]


def run_together(*works: Callable[[], object]) -> None:
    """Run all at once, each on a thread of its own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait(HANGS_S)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def holds(address: int, content: bytes) -> bool:
    """Whether simulated device memory has these bytes there. In place: to copy them takes longer than to compare."""
    return bool(_LIBC.memcmp(ctypes.c_void_p(address), content, ctypes.c_size_t(len(content))) == 0)


def is_accessible(address: int) -> bool:
    """Whether a byte of simulated device memory can be read there, without dying of it."""
    reader, writer = os.pipe()
    try:
        return bool(_LIBC.write(writer, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1)
    finally:
        os.close(reader)
        os.close(writer)


def hooks() -> ctypes.CDLL:
    """The C functions that PyTorch's caching allocator calls; they run without the interpreter lock."""
    library = ctypes.CDLL(_core.__file__)
    library.cumem_sleep_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.cumem_sleep_malloc.restype = ctypes.c_void_p
    library.cumem_sleep_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.cumem_sleep_free.restype = None
    return library


PREAMBLE = """
from cumem_sleep import *
from cumem_sleep import _core, sim
from support import *
"""


def two_free_ports() -> int:
    """The first of them, for servers that start later.

    They are none of those that the kernel gives to whoever asks for any, also to the end of each connection.
    """
    given_from = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(given_from // 2, given_from - 1)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports in a row")


def run_script(
    *parts: str, preamble: str = PREAMBLE, timeout_s: float = HANGS_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, on the simulated driver unless `environment` says otherwise.

    Each part of the script may be indented as it likes.
    """
    # A job in the background (of CI, say) has Ctrl-C ignored, and its children inherit that.
    head = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); del signal"
    script = "\n".join(textwrap.dedent(part) for part in (head, preamble, *parts))
    env = {**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": PATH, **environment}
    if SIMULATED and preamble == PREAMBLE and all(name.startswith("CUMEM_SLEEP_SIM_") for name in environment):
        return Forked(script, env).wait(timeout_s)
    return subprocess.run(
        [sys.executable, *QUIET, "-c", script],
        cwd=FOLDER,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def threads_of_ours(name: str = "cumem-") -> list[str]:
    """The names, those that begin like this, of the layer's threads that there are."""
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append((task / "comm").read_text().rstrip())
    return [each for each in found if each.startswith(name)]


def thread_name() -> str:
    """Of the calling thread, if it is the layer's, or ""."""
    name = pathlib.Path("/proc/thread-self/comm").read_text().rstrip()
    return name if name.startswith("cumem-") else ""


def assert_no_threads(name: str = "cumem-") -> None:
    """One that was told to end does so by itself, soon."""
    ends_at = time.monotonic() + HANGS_S
    while threads := threads_of_ours(name):
        assert time.monotonic() < ends_at, f"{threads} go on"
        time.sleep(0.001)


def patch_prefault(patch: pytest.MonkeyPatch, prefault: Callable[[_core.HostBlock, int, int], None]) -> None:
    """Have this called wherever pages of a block are prefaulted, by threads ahead as well."""
    patch.setattr(_core.HostBlock, "prefault", prefault)
    patch.setattr(_core, "prefault_task", lambda *arguments: _core.Task(functools.partial(prefault, *arguments)))


def patch_map(patch: pytest.MonkeyPatch, map_segment: Callable[[_core.Segment], None]) -> None:
    """Have this called wherever a segment is mapped, by threads ahead as well."""
    patch.setattr(_core.Segment, "map", map_segment)
    patch.setattr(_core, "map_task", lambda segment: _core.Task(functools.partial(map_segment, segment)))


@contextlib.contextmanager
def threads_refused(after: int = 0) -> Iterator[None]:
    """Only so many more threads of the layer can be had, as at a limit of the system."""
    _core.allow_threads(after)
    try:
        yield
    finally:
        _core.allow_threads(-1)


def assert_clean_exit(process: subprocess.CompletedProcess[str]) -> None:
    """The script ended well and said nothing on standard error."""
    assert (process.returncode, process.stderr) == (0, ""), process.stdout + process.stderr


def assert_thread_ends_in_order(*parts: str, thread: str) -> None:
    """The script may leave `thread` (a `Worker`) at work: it has ended before the interpreter is taken down."""
    first = """
        import atexit
        left = []
        atexit.register(lambda: print("at work" if left[0].running else "ended"))
        """
    process = run_script(first, PREAMBLE, *parts, f"left.append({thread})", preamble="")
    assert_clean_exit(process)
    assert process.stdout == "ended\n"


def fork_beside(
    worker: _core.Worker, allocator: CuMemAllocator, *calls: Callable[[], object], as_python_does: bool
) -> None:
    """For scripts: fork while the allocator's lock is held, and beside a thread of it, which the child has not.

    The child sees that `calls` are refused there, and exits. Returns in the parent, when the child has exited well.
    """
    is_held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with allocator._lock.hold():
            is_held.set()
            forked.wait(HANGS_S)

    threading.Thread(target=hold).start()
    assert is_held.wait(HANGS_S)
    assert worker.running
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        assert not worker.running
        assert worker.wait()
        worker.stop()
        for call in calls:
            with raises(cumem_sleep.InvalidState, "fork"):
                call()
        allocator.close()
        sys.exit(0) if as_python_does else os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    forked.set()


class Cuda:
    """A few calls of the simulated driver, as a program beside the allocator makes them. Not the allocator's own."""

    GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
    NO_ACCESS, READ, READ_WRITE = 0, 1, 3
    HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def __init__(self) -> None:
        path = _core.driver_path()
        assert path is not None
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} returned {result}"

    def enter(self) -> None:
        """Make the context of device 0 current to this thread, as PyTorch does."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def leave(self) -> None:
        self.call("cuCtxSetCurrent", None)

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def capture_is_valid(self, stream: ctypes.c_void_p) -> bool:
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value == 1

    def end_capture(self, stream: ctypes.c_void_p) -> int:
        graph = ctypes.c_void_p()
        result: int = self._library.cuStreamEndCapture(stream, ctypes.byref(graph))
        if graph:
            self.call("cuGraphDestroy", graph)
        return result

    def set_access(self, address: int, nbytes: int, device: int, flags: int) -> None:
        description = (ctypes.c_int * 3)(1, device, flags)  # CUmemAccessDesc; 1 is a device
        self.call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(nbytes), description, ctypes.c_size_t(1))

    def access(self, address: int, device: int) -> int:
        flags, location = ctypes.c_ulonglong(), (ctypes.c_int * 2)(1, device)
        self.call("cuMemGetAccess", ctypes.byref(flags), location, ctypes.c_uint64(address))
        return flags.value
