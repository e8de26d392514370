"""A script: workers of engines in vLLM's own parallel groups, on the simulated driver; prints how their sleeps went.

`python engine_ranks.py TENSOR PIPELINE DATA PORT`: how each engine and their number are cut, and where rank 0 is found.
Each worker is a fork: importing vLLM takes ten seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from cumem_sleep import CuMemAllocator, CumemSleepError, InvalidState, OutOfHostMemory, _core, sim
from cumem_sleep.vllm import droppable, worker_refusals
from cumem_sleep.vllm.engine_group import EngineGroup

# There is no device to communicate with.
type(current_platform).get_device_communicator_cls = classmethod(
    lambda _: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)
tensor, pipeline, data, port = map(int, sys.argv[1:])
size = tensor * pipeline


def run(rank: int) -> dict[str, Any]:
    """The worker of that rank among all engines."""
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
    said = []
    for failing in range(size + 1):
        how = ended((engine, mine) == (0, failing))
        awake = [segment.sleep == _core.Segment.Sleep.AWAKE for segment in _core.segments()]
        said.append([how, all(awake)])
        allocator.wake_up()
    allocator.sleep()
    forgets = [forgotten((engine, mine) == (0, failing)) for failing in range(size + 1)]
    allocator.sleep()
    worker = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    steps = [stepped(worker) for _ in range(3)]
    if engine == 0:
        allocator.settings = replace(allocator.settings, agreement_timeout_s=0.5)
        steps.append(stepped(worker))  # another engine is awake, and would wait for this one
    torch.distributed.barrier()
    return {"forgets": forgets, "engine": [group.rank, group.size], "sleeps": said, "steps": steps}


def ended(fails: bool) -> str:
    """How a sleep ends in which this worker fails, or another."""
    if fails:
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN")
    try:
        CuMemAllocator.get_instance().sleep()
    except CumemSleepError as error:
        return f"{type(error).__name__}: rank {getattr(error, 'failed_rank', error.rank)}"
    finally:
        sim.reset()
    return "asleep"


def forgotten(fails: bool) -> str | int:
    """How a forget ends for which this worker, or another, cannot tell what has to stay."""

    def by_forgetting(_: object) -> dict[int, object]:
        if fails:
            raise OutOfHostMemory(1, 0, "test")
        return {}

    droppable.by_forgetting = by_forgetting
    try:
        return droppable.forget(None)
    except CumemSleepError as error:
        return f"{type(error).__name__}: rank {getattr(error, 'failed_rank', error.rank)}"


def stepped(worker: Any) -> str:
    """How a step ends that keeps other engines company."""
    why = worker_refusals.why_not(worker, "execute_dummy_batch", CuMemAllocator.get_instance())
    try:
        return str(worker_refusals.refuse(worker, "execute_dummy_batch", why))
    except InvalidState as error:
        return str(error)


if __name__ == "__main__":
    VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend="mp"))  # imports what each worker needs
    with multiprocessing.get_context("fork").Pool(size * data) as workers:
        print(json.dumps(workers.map(run, range(size * data), chunksize=1)))
