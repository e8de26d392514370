"""The thread of an operation: it is as its caller's, and ends with it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from support import Cuda, in_thread, threads_of_ours

from cumem_sleep import CuMemAllocator, _core

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("has_context", [False, True])
def test_has_the_cuda_state_of_its_caller(allocator: CuMemAllocator, has_context: bool) -> None:
    allocator.free(allocator.malloc(1))
    cuda = Cuda()

    def state() -> tuple[int | None, int]:
        context, mode = ctypes.c_void_p(), ctypes.c_int(cuda.GLOBAL)
        cuda.call("cuCtxGetCurrent", ctypes.byref(context))
        cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(mode.value)))
        return context.value, mode.value

    def call() -> None:
        if has_context:
            cuda.enter()
        cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(cuda.RELAXED)))
        found = _core.OperationLock().run(state)
        assert found == state()
        assert found[1] == cuda.RELAXED
        assert (found[0] is not None) is has_context

    in_thread(call)


def test_is_not_at_work_once_the_operation_has_ended() -> None:
    for _ in range(100):
        _core.OperationLock().run(int)
        assert threads_of_ours("cumem-operation") == []


@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers have thread-local data of their own"
)
def test_thread_local_data_lies_beside_the_stacks() -> None:
    """Else its first use allocates, and a destructor of it would, too."""
    content = Path(_core.__file__).read_bytes()
    assert b"__tls_get_addr" not in content
    assert b"__cxa_thread_atexit" not in content
