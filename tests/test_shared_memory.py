"""Device and host memory that several processes use: bytes, ownership, faults, and nonsense from the other side."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import (
    MIB,
    PAGE,
    SIMULATED,
    Memory,
    assert_clean_exit,
    run_script,
)
from two_processes import other_process

from cumem_sleep import CuMemAllocator, DriverError, InvalidState, OutOfHostMemory, _core, sim

BYTES = 3 * PAGE
only_simulated = pytest.mark.skipif(not SIMULATED, reason="makes the simulated driver fail, or counts what it holds")


@contextlib.contextmanager
def exported(address: int) -> Iterator[tuple[int, int, int]]:
    """The descriptor is closed afterwards."""
    descriptor, base, nbytes = _core.export_memory(address)
    try:
        yield descriptor, base, nbytes
    finally:
        os.close(descriptor)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def free_bytes() -> int:
    return _core.memory_info(0)[0]


class TestExport:
    def test_all_of_a_segment_is_exported_whatever_the_address_in_it(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(BYTES)
        for inside in (address, address + 1, address + BYTES - 1):
            with exported(inside) as (descriptor, base, nbytes):
                assert (base, nbytes) == (address, BYTES)
                assert not os.get_inheritable(descriptor)

    @pytest.mark.usefixtures("allocator")
    def test_scratch_memory_is_exported_like_a_segment(self, memory: Memory) -> None:
        scratch = _core.Scratch(0, 2 * PAGE)
        content = memory.fill_random(scratch.address, scratch.bytes)
        with exported(scratch.address + PAGE) as (descriptor, base, nbytes):
            assert (base, nbytes) == (scratch.address, scratch.bytes)
            imported = _core.ImportedMemory(descriptor, 0, nbytes)
        assert memory.read(imported.address, nbytes) == content
        imported.close()
        scratch.close()
        with pytest.raises(InvalidState, match=f"{base:#x} is not in memory of this layer"):
            _core.export_memory(base)

    def test_what_is_no_memory_of_the_layer_is_refused_by_its_address(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        for wrong in (0, 4096, address - 1, address + PAGE):
            with pytest.raises(InvalidState, match=f"{wrong:#x} is not in memory of this layer"):
                _core.export_memory(wrong)
        allocator.free(address)
        with pytest.raises(InvalidState, match="already freed, or never allocated here"):
            _core.export_memory(address)

    def test_a_sleeping_segment_is_refused(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        allocator.sleep()
        with pytest.raises(InvalidState, match=f"segment at {address:#x} has no memory to export while it is asleep"):
            _core.export_memory(address)
        allocator.wake_up()
        with exported(address):
            pass

    def test_a_segment_that_is_about_to_wake_is_exported(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """For whoever is to fill it: it is mapped, though it sleeps until its bytes are verified."""
        address = allocator.malloc(PAGE)
        allocator.sleep(2)
        (segment,) = _core.segments()
        with _core.HeldSegments([segment]):
            segment.map()
            with exported(address) as (descriptor, _, nbytes):
                imported = _core.ImportedMemory(descriptor, 0, nbytes)
            content = memory.fill_random(imported.address, nbytes)
            imported.close()
            assert memory.read(address, nbytes) == content
            _core.undo_wake([segment])
        assert not segment.has_memory

    @only_simulated
    def test_a_host_that_makes_no_memory_to_export_says_so(self) -> None:
        process = run_script(
            """
            allocator = CuMemAllocator(Settings(driver="sim"))
            sim.fail("cuMemCreate", error="CUDA_ERROR_NOT_SUPPORTED", times=2)  # with descriptors, with RDMA too
            address = allocator.malloc(PAGE)
            assert not _core.device_info(0).posix_fd
            with raises(DriverError, "cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED", f"{address:#x}"):
                _core.export_memory(address)
            allocator.sleep()
            allocator.wake_up()
            """
        )
        assert_clean_exit(process)


class TestTwoProcesses:
    def test_bytes_are_exact_both_ways(self, allocator: CuMemAllocator, memory: Memory) -> None:
        """The other process copies them out, gives a read-only view of its copy, and writes others back."""
        address = allocator.malloc(BYTES)
        content = memory.fill_random(address, BYTES)
        script = """
            open_driver()
            nbytes, descriptor = link.receive()
            imported = _core.ImportedMemory(descriptor, 0, nbytes)
            os.close(descriptor)
            block = _core.HostBlock.shared(nbytes, -1)
            block.prefault(0, nbytes)
            block.pin(0)
            with _core.CopyStream(0) as stream:
                stream.to_host(block, 0, imported.address, nbytes)
                stream.synchronize()
                reader = os.open(f"/proc/self/fd/{block.fd}", os.O_RDONLY)
                link.send(None, reader)
                os.close(reader)
                link.receive()
                memoryview(block)[:] = bytes(reversed(memoryview(block)))
                stream.to_device(imported.address, block, 0, nbytes)
            imported.close()
            block.close()
            assert not SIMULATED or sim.stats().live_handles == sim.stats().mapped_bytes == 0
            assert not SIMULATED or sim.stats().registered_bytes == sim.stats().reserved_bytes == 0
            link.send()
        """
        with other_process(script) as (link, _):
            with exported(address) as (descriptor, _, nbytes):
                link.send(nbytes, descriptor)
            _, reader = link.receive()
            block = _core.HostBlock.mapped(reader, BYTES, False)
            os.close(reader)
            assert bytes(memoryview(block)) == content
            link.send()
            link.receive()
        assert bytes(memoryview(block)) == content[::-1]  # pages stay for those who map them, whoever is gone
        assert memory.read(address, BYTES) == content[::-1]
        block.close()

    @pytest.mark.slow
    @only_simulated
    def test_memory_is_the_device_s_again_when_both_have_given_it_up(self, allocator: CuMemAllocator) -> None:
        address, before = allocator.malloc(PAGE), free_bytes()
        script = """
            open_driver()
            nbytes, descriptor = link.receive()
            imported = _core.ImportedMemory(descriptor, 0, nbytes)
            os.close(descriptor)
            link.send()
            if link.receive() == "close":
                imported.close()
                link.send()
            link.receive()
        """
        for how in ("close", "die"):
            with other_process(script) as (link, process):
                with exported(address) as (descriptor, _, nbytes):
                    link.send(nbytes, descriptor)
                link.receive()
                allocator.free(address)
                assert free_bytes() == before
                if how == "close":
                    link.send(how)
                    link.receive()
                else:
                    process.kill()
                    process.wait()
                assert free_bytes() == before + PAGE
                if how == "close":
                    link.send()
            address = allocator.malloc(PAGE)

    @only_simulated
    def test_devices_are_known_by_their_uuids(self, allocator: CuMemAllocator, memory: Memory) -> None:
        address = allocator.malloc(PAGE)
        content = memory.fill_random(address, PAGE)
        uuid = _core.device_info(0).uuid
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
        script = """
            open_driver()
            uuid, descriptor = link.receive()
            uuids = [_core.device_info(device).uuid for device in range(_core.device_count())]
            device = uuids.index(uuid)
            assert device == 2
            with raises(InvalidState, f"fd={descriptor}: its memory is on device 2, not on device 0"):
                _core.ImportedMemory(descriptor, 0, PAGE)
            imported = _core.ImportedMemory(descriptor, device, PAGE)
            link.send(Memory().read(imported.address, 4096, device))
        """
        environment = {"CUMEM_SLEEP_SIM_DEVICES": "3", "CUMEM_SLEEP_SIM_DEVICE_ORDER": "7,2"}
        with other_process(script, **environment) as (link, _), exported(address) as (descriptor, _, _):
            link.send(uuid, descriptor)
            assert link.receive() == content[:4096]


class TestImport:
    def test_closing_again_does_nothing_and_leaves_the_descriptor_open(self, allocator: CuMemAllocator) -> None:
        with exported(allocator.malloc(PAGE)) as (descriptor, _, nbytes):
            imported = _core.ImportedMemory(descriptor, 0, nbytes)
            assert (imported.bytes, imported.device) == (PAGE, 0)
            imported.close()
            imported.close()
            os.fstat(descriptor)

    @pytest.mark.parametrize("kind", ["file", "pipe", "socket", "memfd", "shared block", "directory"])
    def test_descriptors_of_something_else(self, kind: str, allocator: CuMemAllocator, tmp_path: pathlib.Path) -> None:
        allocator.malloc(PAGE)
        with nonsense(kind, tmp_path) as descriptor:
            before = descriptors()
            with pytest.raises(DriverError, match=f"file descriptor {descriptor}\\b") as error:
                _core.ImportedMemory(descriptor, 0, PAGE)
            assert error.value.call == "cuMemImportFromShareableHandle"
            assert descriptors() == before

    @pytest.mark.parametrize("wrong", [-1, 987654, 2**31 - 1])
    def test_descriptors_that_are_not_open(self, wrong: int, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        with pytest.raises(InvalidState, match=f"fd={wrong}: not an open file descriptor"):
            _core.ImportedMemory(wrong, 0, PAGE)

    @pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 4096, 2**63 + 1])
    def test_sizes_that_no_memory_has(self, nbytes: int, allocator: CuMemAllocator) -> None:
        words = f"bytes={nbytes}: .* multiples of {PAGE} bytes on device 0"
        with exported(allocator.malloc(PAGE)) as (descriptor, _, _), pytest.raises(InvalidState, match=words):
            _core.ImportedMemory(descriptor, 0, nbytes)

    def test_a_size_that_the_memory_has_not(self, allocator: CuMemAllocator) -> None:
        words = rf"memory of file descriptor \d+ at .*{2 * PAGE} bytes"
        with exported(allocator.malloc(PAGE)) as (descriptor, _, _), pytest.raises(DriverError, match=words):
            _core.ImportedMemory(descriptor, 0, 2 * PAGE)

    def test_a_device_that_there_is_not(self, allocator: CuMemAllocator) -> None:
        count = _core.device_count() if allocator.malloc(PAGE) else 0
        with exported(_core.segments()[0].address) as (descriptor, _, _):
            for device in (-1, count):
                with pytest.raises(InvalidState, match=f"device {device} does not exist"):
                    _core.ImportedMemory(descriptor, device, PAGE)


@contextlib.contextmanager
def nonsense(kind: str, tmp_path: pathlib.Path) -> Iterator[int]:
    """A descriptor of something that nobody has exported, as large as a page of device memory."""
    with contextlib.ExitStack() as stack:
        if kind == "file":
            (tmp_path / "file").write_bytes(bytes(PAGE))
            yield stack.enter_context(open(tmp_path / "file", "r+b")).fileno()
        elif kind == "pipe":
            for end in (ends := os.pipe()):
                stack.callback(os.close, end)
            yield ends[0]
        elif kind == "socket":
            yield stack.enter_context(socket.socket()).fileno()
        elif kind == "directory":
            stack.callback(os.close, directory := os.open(tmp_path, os.O_RDONLY))
            yield directory
        elif kind == "memfd":
            stack.callback(os.close, file := os.memfd_create("other", os.MFD_ALLOW_SEALING))
            os.ftruncate(file, PAGE)
            yield file
        else:
            assert kind == "shared block"
            block = _core.HostBlock.shared(PAGE, -1)
            stack.callback(block.close)
            yield block.fd


class TestHostBlocks:
    @pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 * MIB + 5])
    def test_of_any_size(self, nbytes: int) -> None:
        block = _core.HostBlock.shared(nbytes, -1)
        assert block.bytes == nbytes
        assert not os.get_inheritable(block.fd)
        other = _core.HostBlock.mapped(block.fd, nbytes, True)
        assert (other.fd, other.bytes) == (-1, nbytes)
        memoryview(other)[-1] = 7
        assert memoryview(block)[-1] == 7

    def test_sizes_that_cannot_be(self) -> None:
        before = descriptors()
        with pytest.raises(InvalidState, match="bytes=0"):
            _core.HostBlock.shared(0, -1)
        for huge in (2**48, 2**62, 2**64 - 1):
            with pytest.raises(OutOfHostMemory, match=str(huge)):
                _core.HostBlock.shared(huge, -1)
            with pytest.raises(OutOfHostMemory, match=str(huge)):
                _core.HostBlock(huge, -1)
        assert descriptors() == before

    def test_reserved_huge_pages_are_taken_whole_or_not_at_all(self) -> None:
        before = descriptors()
        with pytest.raises(InvalidState, match="not a multiple of a huge page"):
            _core.HostBlock.shared(3 * MIB, -1, True)
        with pytest.raises(OutOfHostMemory, match=str(2**46)):  # more than any system has
            _core.HostBlock.shared(2**46, -1, True)
        assert descriptors() == before

    def test_can_neither_shrink_nor_grow(self) -> None:
        block = _core.HostBlock.shared(2 * 4096, -1)
        for size in (0, 4096, 3 * 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(block.fd, size)

    def test_a_closed_block_has_given_its_pages_back_although_somebody_holds_a_view(self) -> None:
        block, before = _core.HostBlock.shared(MIB, -1), descriptors()
        view = memoryview(block)
        view[:] = bytes(range(256)) * (MIB // 256)
        assert "memfd:cumem-sleep" in pathlib.Path("/proc/self/maps").read_text()
        block.close()
        assert "memfd:cumem-sleep" not in pathlib.Path("/proc/self/maps").read_text()
        assert (block.fd, descriptors()) == (-1, before - 1)
        assert bytes(view) == bytes(MIB)


class TestReadOnly:
    @pytest.fixture
    def block(self, allocator: CuMemAllocator) -> Iterator[_core.HostBlock]:
        """A client's view of a block that it was given a read-only descriptor of."""
        allocator.malloc(PAGE)
        owner = _core.HostBlock.shared(PAGE, -1)
        reader = os.open(f"/proc/self/fd/{owner.fd}", os.O_RDONLY)
        block = _core.HostBlock.mapped(reader, PAGE, False)
        os.close(reader)
        yield block
        block.close()
        owner.close()

    def test_a_view_of_it_is_read_only(self, block: _core.HostBlock) -> None:
        assert not block.writable
        assert memoryview(block).readonly
        with pytest.raises(TypeError):
            memoryview(block)[0] = 1

    def test_no_copy_is_made_to_it(self, block: _core.HostBlock) -> None:
        block.prefault(0, PAGE)
        block.pin(0)
        assert block.pinned
        with _core.CopyStream(0) as stream, pytest.raises(InvalidState, match="read-only"):
            stream.to_host(block, 0, _core.segments()[0].address, PAGE)

    @only_simulated
    def test_a_driver_that_registers_no_such_memory_is_told_of(self, block: _core.HostBlock) -> None:
        sim.fail("cuMemHostRegister", error="CUDA_ERROR_NOT_SUPPORTED")
        with pytest.raises(DriverError, match="cuMemHostRegister failed with CUDA_ERROR_NOT_SUPPORTED"):
            block.pin(0)
        assert not block.pinned

    def test_its_descriptor_cannot_be_mapped_to_be_written(self) -> None:
        owner = _core.HostBlock.shared(PAGE, -1)
        reader = os.open(f"/proc/self/fd/{owner.fd}", os.O_RDONLY)
        try:
            with pytest.raises(InvalidState, match=f"fd={reader} was opened read-only"):
                _core.HostBlock.mapped(reader, PAGE, True)
            with pytest.raises(PermissionError):
                mmap.mmap(reader, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(reader, b"x")
        finally:
            os.close(reader)

    def test_a_write_faults_and_the_pages_cannot_be_made_writable(self) -> None:
        process = run_script(
            """
            owner = _core.HostBlock.shared(PAGE, -1)
            block = _core.HostBlock.mapped(os.open(f"/proc/self/fd/{owner.fd}", os.O_RDONLY), PAGE, False)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mprotect(ctypes.c_void_p(block.address), ctypes.c_size_t(PAGE), 3) == -1
            print(ctypes.get_errno(), flush=True)
            ctypes.memset(block.address, 1, 1)
            print("written")
            """,
            PYTHONFAULTHANDLER="",
        )
        assert process.returncode == -signal.SIGSEGV
        assert process.stdout == f"{errno.EACCES}\n"


@only_simulated
class TestFaults:
    """Every driver call that sharing makes fails once, and several times in a row: nothing is left behind."""

    @staticmethod
    def cycle(address: int, block_of: Callable[[], _core.HostBlock]) -> bytes:
        """Export, import, copy to a shared block, close all; what was copied."""
        with contextlib.ExitStack() as stack:
            descriptor, _, nbytes = stack.enter_context(exported(address))
            imported = _core.ImportedMemory(descriptor, 0, nbytes)
            stack.callback(imported.close)
            block = block_of()
            stack.callback(block.close)
            block.prefault(0, nbytes)
            block.pin(0)
            with _core.CopyStream(0) as stream:
                stream.to_host(block, 0, imported.address, nbytes)
                stream.synchronize()
            return bytes(memoryview(block))

    def held(self) -> tuple[Any, ...]:
        _core.release_waiter(0)
        stats = sim.stats()
        held = (stats.live_handles, stats.mapped_bytes, stats.reserved_bytes, stats.registered_bytes)
        maps = pathlib.Path("/proc/self/maps").read_text()
        return (*held, free_bytes(), descriptors(), maps.count("memfd:cumem-sleep"))

    @pytest.mark.slow
    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_nothing_is_left_behind(self, times: int, allocator: CuMemAllocator, memory: Memory) -> None:
        address = allocator.malloc(PAGE)
        content = memory.fill_random(address, PAGE)

        def make() -> _core.HostBlock:
            return _core.HostBlock.shared(PAGE, -1)

        assert self.cycle(address, make) == content
        sim.reset()
        self.cycle(address, make)
        made = {call: count for call, count in sim.stats().calls.items() if count}
        assert {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"} <= set(made)
        before, errors = self.held(), set()
        for call, count in made.items():
            for after in range(count):
                sim.reset()
                sim.fail(call, after, "CUDA_ERROR_UNKNOWN", times)
                try:
                    assert self.cycle(address, make) == content
                except DriverError as error:
                    errors.add(error.error)
                sim.reset()
                assert _core.reclaim() == 0
                assert self.held() == before, (call, after)
        assert errors == {"CUDA_ERROR_UNKNOWN"}
        assert memory.read(address, PAGE) == content


@pytest.mark.skipif(
    _core.CHECKS_INVARIANTS, reason="sanitizers look at an object through a pipe, for which no descriptor is left"
)
class TestDescriptorLimit:
    def test_is_told_with_what_to_do(self) -> None:
        process = run_script(
            """
            import resource
            allocator = CuMemAllocator(Settings(driver=DRIVER))
            address = allocator.malloc(PAGE)
            descriptor, _, _ = _core.export_memory(address)
            _core.ImportedMemory(descriptor, 0, PAGE).close()
            fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            filler = []
            try:
                while True:
                    filler.append(os.dup(descriptor))
            except OSError:
                pass
            words = "reached its limit of open files, 64: raise it"
            with raises(InvalidState, "memfd_create", words):
                _core.HostBlock.shared(PAGE, -1)
            with raises(InvalidState, "cuMemExportToShareableHandle", words):
                _core.export_memory(address)
            if SIMULATED:
                with raises(InvalidState, "cuMemImportFromShareableHandle", words):
                    _core.ImportedMemory(descriptor, 0, PAGE)
                assert sim.stats().live_handles == 1
            for each in filler:
                os.close(each)
            _core.HostBlock.shared(PAGE, -1).close()
            _core.ImportedMemory(descriptor, 0, PAGE).close()
            """
        )
        assert_clean_exit(process)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


class TestFork:
    def test_a_child_cannot_use_what_its_parent_shares_and_takes_nothing_away(self) -> None:
        process = run_script(
            """
            allocator = CuMemAllocator(Settings(driver=DRIVER))
            address = allocator.malloc(PAGE)
            memory = Memory()
            content = memory.fill_random(address, PAGE)
            descriptor, _, _ = _core.export_memory(address)
            imported = _core.ImportedMemory(descriptor, 0, PAGE)
            block = _core.HostBlock.shared(PAGE, -1)
            memoryview(block)[:] = content
            block.pin(0)
            child = os.fork()
            if child == 0:
                for refused in (
                    lambda: _core.ImportedMemory(descriptor, 0, PAGE),
                    lambda: _core.export_memory(address),
                    lambda: block.prefault(0, PAGE),
                    lambda: block.pin(0),
                ):
                    with raises(InvalidState, "fork"):
                        refused()
                imported.close()
                block.close()
                del imported, block
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert memory.read(imported.address, PAGE) == bytes(memoryview(block)) == content
            assert os.fstat(block.fd).st_size == PAGE
            """
        )
        assert_clean_exit(process)
