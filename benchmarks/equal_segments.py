"""Are segments equal, byte for byte, that hold equal tensors? Bytes that PyTorch never wrote count as well.

    python benchmarks/equal_segments.py --out equal_segments.json --questions fresh_memory equal_tensors

A digest is that of a whole segment, which may be longer than the tensors in it, so replicas share a backup only if the
rest is equal, too: what `cuMemCreate` hands out. Each question is answered by a process of its own; the other two
questions are steps of these.
"""

from __future__ import annotations

import sys
from typing import Any

from questions import answer, main
from scenarios.vault import what_differs
from worker_extension import DeviceMemory, Extension

GIB = 1 << 30
LEFT_BYTES = 6 * GIB  # of the GPU, for contexts and kernels
GARBAGE = 0x5EA5E5A5
TIMEOUT_S = 60.0
TENSOR_BYTES = 151936 * 1024 * 4  # 593.5 MiB: its segment has 0.5 MiB more, which PyTorch does not split off


def all_of_it() -> list[int]:
    """Addresses of fresh segments of a GiB each, of nearly all memory that is free."""
    import torch

    from cumem_sleep import CuMemAllocator

    free, _ = torch.cuda.mem_get_info()
    allocator = CuMemAllocator.get_instance()
    return [allocator.malloc(GIB) for _ in range((free - LEFT_BYTES) // GIB)]


def words(address: int) -> Any:
    import torch

    return torch.as_tensor(DeviceMemory(address, GIB), device="cuda")


def words_not_zero(addresses: list[int]) -> int:
    return sum(int(words(address).count_nonzero()) for address in addresses)


def garbage() -> dict[str, Any]:
    """Leaves it everywhere."""
    addresses = all_of_it()
    for address in addresses:
        words(address).fill_(GARBAGE)
    return {"gib": len(addresses), "words not zero": words_not_zero(addresses)}


def fresh_memory() -> dict[str, Any]:
    """How much of it is not zero: after another process has ended, and after this one has freed it."""
    from cumem_sleep import CuMemAllocator

    before = answer("garbage", TIMEOUT_S)
    addresses = all_of_it()
    found = {"after another process": words_not_zero(addresses)}
    for address in addresses:
        words(address).fill_(GARBAGE)
        CuMemAllocator.get_instance().free(address)
    again = all_of_it()
    found["after this process"] = words_not_zero(again)
    return {"garbage": before, "gib": [len(addresses), len(again)], "words not zero": found}


def filled() -> dict[str, Any]:
    """The segments of one tensor, in a pool of this layer, through PyTorch."""
    import torch

    from cumem_sleep import CuMemAllocator

    with CuMemAllocator.get_instance().use_memory_pool("weights"):
        tensor = torch.empty(TENSOR_BYTES // 4, dtype=torch.int32, device="cuda")
    torch.arange(tensor.numel(), out=tensor)
    torch.cuda.synchronize()
    return {"segments": Extension().weights_by_segment()}


def equal_tensors() -> dict[str, Any]:
    """In two processes, after a third has left garbage everywhere."""
    before = answer("garbage", TIMEOUT_S)
    processes = [answer("filled", TIMEOUT_S) for _ in range(2)]
    if errors := [process["error"] for process in processes if "error" in process]:
        sys.exit(errors[0])
    one, other = (process["segments"] for process in processes)
    return {"garbage": before, "segments": [each["bytes"] for each in one], "differ": what_differs(one, other)}


QUESTIONS = {f.__name__: f for f in (garbage, fresh_memory, filled, equal_tensors)}

if __name__ == "__main__":
    main(__doc__, QUESTIONS, timeout_s=2 * TIMEOUT_S)
