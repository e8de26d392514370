"""A script: one rank of a gloo group, `python gloo_rank.py RANK SIZE STORE`; prints how its sleeps went."""

import sys
from datetime import timedelta

import torch.distributed

from cumem_sleep import CuMemAllocator, CumemSleepError, InvalidArgument, sim

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=300)
)
try:
    CuMemAllocator(group="gloo")
except InvalidArgument as error:
    assert "process group" in str(error)  # noqa: PT017
allocator = CuMemAllocator(group=torch.distributed.group.WORLD)
allocator.malloc(1, "weights")
if rank == 0:
    sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN")
try:
    allocator.sleep()
except CumemSleepError as error:
    print(type(error).__name__)
print(allocator.sleep().freed_bytes, allocator.wake_up().mapped_bytes)
