"""What happens at exit, and with PyTorch configured otherwise: each in a fresh process. Needs a real GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("torch")

SETUP = """
import torch
from cumem_sleep import CuMemAllocator
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool("weights"):
    weights = torch.randn(64 << 20, device="cuda")
expected = weights.cpu()
"""
GRAPH = """
graph = torch.cuda.CUDAGraph()
weights.sum().item()
with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
    y = weights * 2
graph.replay()
torch.cuda.synchronize()
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parent,  # not the checkout, whose package may not be built
        capture_output=True,
        text=True,
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "cuda", **environment},
        timeout=100,
        check=False,
    )


def check_clean(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    assert "cumem-sleep:" not in result.stderr
    assert "terminate" not in result.stderr
    assert "Error" not in result.stderr


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "allocator.sleep(1)",
        "allocator.sleep(2)",
        GRAPH,
        GRAPH + "allocator.sleep(1)",
        GRAPH + "allocator.release_pools()",
        GRAPH + "allocator.close()",
        "pool = allocator.use_memory_pool('kv_cache'); pool.__enter__(); kv = torch.ones(8 << 20, device='cuda')",
        "import threading; threading.Thread(target=allocator.sleep).start()",
        "del weights",
    ],
    ids=["awake", "asleep", "dropped", "graph", "graph-asleep", "released", "closed", "inside-pool", "thread", "freed"],
)
def test_exit_is_clean(ending: str) -> None:
    check_clean(run(SETUP + ending))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_do_not_matter(variable: str) -> None:
    result = run(
        SETUP
        + """
assert allocator.usage()["weights"].bytes == 256 << 20, allocator.usage()
free = torch.cuda.mem_get_info()[0]
allocator.sleep(1)
assert torch.cuda.mem_get_info()[0] - free >= 252 << 20  # less the page tables of the pinned backup
allocator.wake_up()
assert torch.equal(weights.cpu(), expected)
settings = torch.cuda.memory._snapshot()["allocator_settings"]
assert settings["expandable_segments"] is True, settings
assert settings["max_split_size"] == 512 << 20, settings
outside = torch.ones(8 << 20, device="cuda")
assert any(s["is_expandable"] for s in torch.cuda.memory_snapshot())
""",
        **{variable: "expandable_segments:True,max_split_size_mb:512"},
    )
    check_clean(result)


def test_a_process_forked_after_use_is_told_so() -> None:
    result = run(
        SETUP
        + """
import os
from cumem_sleep import InvalidState
child = os.fork()
if child == 0:
    try:
        allocator.sleep()
    except InvalidState as error:
        os._exit(0 if "fork" in str(error) else 3)
    os._exit(4)
assert os.waitpid(child, 0)[1] == 0
allocator.sleep()
allocator.wake_up()
assert torch.equal(weights.cpu(), expected)
"""
    )
    check_clean(result)


def test_import_creates_no_context() -> None:
    result = run(
        """
import ctypes, threading
import cumem_sleep
cumem_sleep.CuMemAllocator.get_instance()
assert "libcuda" not in open("/proc/self/maps").read()
assert threading.active_count() == 1
"""
    )
    check_clean(result)
