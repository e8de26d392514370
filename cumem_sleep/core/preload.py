"""The hook in front of cudaMalloc and cudaFree (`csrc/preload`), where LD_PRELOAD names it.

With it, memory can be a region's that PyTorch's own allocator asks for, or somebody else through the CUDA runtime.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .. import _core

_SERVE = "cumem_sleep_preload_serve"
_CALLS = "cumem_sleep_preload_calls"
_TagCall = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_HOOKS = ("cumem_sleep_malloc", "cumem_sleep_free", "cumem_sleep_wants", "cumem_sleep_owns")


def library_path() -> Path:
    """Of the hook, for LD_PRELOAD."""
    shim = Path(__file__).parents[1] / "integrations" / "torch_memory_saver" / "shim"
    return shim / "torch_memory_saver_hook_mode_preload.abi3.so"


@cache
def serve() -> bool:
    """Have the hook ask this layer; returns whether there is one in this process."""
    served = getattr(ctypes.CDLL(None), _SERVE, None)
    if served is None:
        return False
    layer = ctypes.CDLL(_core.__file__)
    served(*(ctypes.cast(getattr(layer, name), ctypes.c_void_p) for name in _HOOKS))
    return True


def take_calls(pause: Callable[[str | None], None], resume: Callable[[str | None], None]) -> None:
    """Have the library's `tms_pause` and `tms_resume` call these, with a tag, or None for all.

    C code gets no errors: they are reported as unraisable. Without the library this does nothing.
    """
    calls = getattr(ctypes.CDLL(None), _CALLS, None)
    if calls is None:
        return

    def with_tag(call: Callable[[str | None], None]) -> Callable[[bytes | None], None]:
        return lambda tag: call(None if tag is None else tag.decode(errors="surrogateescape"))

    taken = _TagCall(with_tag(pause)), _TagCall(with_tag(resume))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(taken))  # for ever: a thread may be about to call one
    calls(*taken)
    atexit.register(calls, None, None)
