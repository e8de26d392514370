"""Which workers sleep and wake together: vLLM's own parallel groups, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess
from support import PAGE, two_free_ports

skip_unless_vllm()


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data"),
    [pytest.param(2, 2, 1, id="tensor and pipeline"), pytest.param(2, 1, 2, id="two engines of data parallel")],
)
def test_all_workers_of_an_engine_or_none(
    ready_process: ReadyProcess, tmp_path: Path, tensor: int, pipeline: int, data: int
) -> None:
    """Each rank of the first engine fails once: all of its ranks stay as they are and name it; no other engine does.

    The others hear of it at once, also where what fails precedes the operation. A step that keeps other engines company
    does nothing while all of them sleep.
    """
    size = tensor * pipeline
    cut = [str(each) for each in (tensor, pipeline, data, two_free_ports())]
    environment = {"CUMEM_SLEEP_AGREEMENT_TIMEOUT_S": "120"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # else PyTorch begins CUDA before the fork
    log = ready_process.check("engine_ranks.py", tmp_path / "log", *cut, **environment)
    said = json.loads(next(line for line in log.splitlines() if line.startswith("[{")))
    assert len(said) == size * data
    for number, each in enumerate(said):
        engine, mine = divmod(number, size)
        assert each["engine"] == [mine, size]
        named = [f"{'mine' if rank == mine else 'RankFailed'}: rank {rank}" for rank in range(size)]
        sleeps = [[how.replace("mine", "DriverError"), True] for how in named]
        assert each["sleeps"] == [*(sleeps if engine == 0 else [["asleep", False]] * size), ["asleep", False]]
        forgets = [*(how.replace("mine", "OutOfHostMemory") for how in named), PAGE]
        assert each["forgets"] == (forgets if engine == 0 else [PAGE, *[0] * size])
        alone = "None" if data == 1 else "execute_dummy_batch while weights sleep: wake_up() comes first"
        assert each["steps"] == ["None"] * 3 + ([alone] if engine == 0 else [])
