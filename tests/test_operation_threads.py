"""The thread of an operation: the next operation gets it as if it were new, and soon after the last one it ends."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
from support import Cuda, assert_clean_exit, in_thread, run_script, threads_of_ours, threads_refused
from test_signals import until

from cumem_sleep import CuMemAllocator, _core

pytestmark = pytest.mark.sim


def thread_of_an_operation() -> int:
    return _core.OperationLock().run(threading.get_native_id)


def the_thread_stays() -> bool:
    """Unless the machine is so busy that it has ended before the next operation."""
    return thread_of_an_operation() == thread_of_an_operation()


@pytest.mark.usefixtures("allocated")
class TestThread:
    @pytest.fixture
    def allocated(self, allocator: CuMemAllocator) -> None:
        """Before the driver is open a thread does not stay: nobody could tell what state it is in."""
        allocator.free(allocator.malloc(1))

    def test_serves_operations_that_follow_each_other(self) -> None:
        until(the_thread_stays)

    def test_is_of_one_operation_at_a_time(self) -> None:
        threads: list[int] = []
        both = threading.Barrier(2)

        def work() -> None:
            threads.append(threading.get_native_id())
            both.wait(30)

        other = threading.Thread(target=_core.OperationLock().run, args=[work])
        other.start()
        _core.OperationLock().run(work)
        other.join(30)
        assert len(set(threads)) == 2

    def test_ends_when_no_operation_follows(self) -> None:
        thread = thread_of_an_operation()
        until(lambda: not Path(f"/proc/self/task/{thread}").exists())

    def test_is_not_at_work_once_the_operation_has_ended(self) -> None:
        for _ in range(100):
            thread_of_an_operation()
            assert threads_of_ours("cumem-operation") == []

    def test_ends_at_once_if_it_cannot_be_left_as_it_was(self) -> None:
        """At level 3 no driver call may be made, that for its context included."""
        until(the_thread_stays)
        assert _core.suspend_driver_calls(1.0)
        try:
            assert not the_thread_stays()
        finally:
            _core.resume_driver_calls()

    def test_does_not_stay_where_threads_are_limited(self) -> None:
        until(the_thread_stays)
        with threads_refused():
            assert thread_of_an_operation() == threading.get_native_id()
        with threads_refused(after=2):
            assert not the_thread_stays()


class TestTheNextOperation:
    """On the same thread, and nothing shows that."""

    @pytest.mark.parametrize("has_context", [False, True])
    def test_has_the_cuda_state_of_its_caller(self, allocator: CuMemAllocator, has_context: bool) -> None:
        allocator.free(allocator.malloc(1))
        cuda = Cuda()

        def state() -> tuple[int, int | None, int]:
            context, mode = ctypes.c_void_p(), ctypes.c_int(cuda.GLOBAL)
            cuda.call("cuCtxGetCurrent", ctypes.byref(context))
            cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(mode.value)))
            return threading.get_native_id(), context.value, mode.value

        def changed() -> int:
            cuda.enter()
            cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(cuda.RELAXED)))
            return threading.get_native_id()

        def same_after_a_change() -> bool:
            thread = _core.OperationLock().run(changed)
            found = _core.OperationLock().run(state)
            assert found[1:] == state()[1:]
            return found[0] == thread

        def call() -> None:
            if has_context:
                cuda.enter()
            until(same_after_a_change)

        in_thread(call)

    def test_has_no_thread_local_values(self, allocator: CuMemAllocator) -> None:
        allocator.free(allocator.malloc(1))
        local = threading.local()

        def noted() -> tuple[int, bool]:
            before = hasattr(local, "value")
            local.value = 1
            return threading.get_native_id(), before

        def same_thread() -> bool:
            (first, _), (second, has_value) = _core.OperationLock().run(noted), _core.OperationLock().run(noted)
            assert not has_value
            return first == second

        until(same_thread)

    def test_of_a_forked_child_has_a_thread_of_the_childs(self) -> None:
        process = run_script(
            """
            import os, threading

            allocator = CuMemAllocator.get_instance()
            allocator.free(allocator.malloc(1))
            for _ in range(20):
                parents = allocator._lock.run(threading.get_native_id)
                child = os.fork()
                if child == 0:
                    mine = allocator._lock.run(threading.get_native_id)
                    os._exit(0 if mine != parents and allocator._lock.run(int) == 0 else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                allocator._lock.run(int)
            """
        )
        assert_clean_exit(process)


@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers have thread-local data of their own"
)
def test_thread_local_data_lies_beside_the_stacks() -> None:
    """Else its first use allocates, and a destructor of it would, too."""
    content = Path(_core.__file__).read_bytes()
    assert b"__tls_get_addr" not in content
    assert b"__cxa_thread_atexit" not in content
