"""A script: one worker of an engine in vLLM's own parallel groups, on the simulated driver; prints how its sleeps went.

`python engine_rank.py RANK TENSOR PIPELINE DATA PORT`: its rank among all engines, how each engine and their number are
cut, and where rank 0 is found.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch.distributed
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from cumem_sleep import CuMemAllocator, CumemSleepError, OutOfHostMemory, _core, sim
from cumem_sleep.vllm import forget
from cumem_sleep.vllm.engine_group import EngineGroup

# There is no device to communicate with.
type(current_platform).get_device_communicator_cls = classmethod(
    lambda _: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)
rank, tensor, pipeline, data, port = map(int, sys.argv[1:])
size = tensor * pipeline
engine, mine = divmod(rank, size)
torch.distributed.init_process_group(
    "gloo",
    init_method=f"tcp://127.0.0.1:{port}",
    rank=rank,
    world_size=size * data,
    timeout=timedelta(seconds=300),
)
parallel = ParallelConfig(
    tensor_parallel_size=tensor,
    pipeline_parallel_size=pipeline,
    data_parallel_size=data,
    data_parallel_rank=engine,
    distributed_executor_backend="mp",
)
with set_current_vllm_config(VllmConfig(parallel_config=parallel, device_config=DeviceConfig(device="cpu"))):
    parallel_state.init_distributed_environment(size, mine, "env://", local_rank=rank, backend="gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    group = EngineGroup()

allocator = CuMemAllocator.get_instance()
allocator.malloc(1, "weights")
allocator.join(group)


def ended(failing: int) -> str:
    """How a sleep ends in which that rank of the first engine fails."""
    if (engine, mine) == (0, failing):
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN")
    try:
        allocator.sleep()
    except CumemSleepError as error:
        return f"{type(error).__name__}: rank {getattr(error, 'failed_rank', error.rank)}"
    finally:
        sim.reset()
    return "asleep"


def forgotten(failing: int) -> str | int:
    """How a forget ends for which that rank of the first engine cannot copy what its worker keeps."""

    def copies(*_: object) -> dict[str, object]:
        if (engine, mine) == (0, failing):
            raise OutOfHostMemory(1, 0, "test")
        return {}

    forget._copies = copies
    try:
        return forget.forget(None)
    except CumemSleepError as error:
        return f"{type(error).__name__}: rank {getattr(error, 'failed_rank', error.rank)}"


said = []
for failing in range(size + 1):
    how = ended(failing)
    awake = [segment.sleep == _core.Segment.Sleep.AWAKE for segment in _core.segments()]
    said.append([how, all(awake)])
    allocator.wake_up()
allocator.sleep()
forgotten_by = [forgotten(failing) for failing in range(size + 1)]
print(json.dumps({"forgets": forgotten_by, "engine": [group.rank, group.size], "sleeps": said}))
