"""Sleep and wake bandwidth of this layer, of vLLM's own and of torch_memory_saver, by pytest-benchmark.

`pytest benchmarks` measures those that are installed, on a GPU, or, as it says, on the simulated driver. Each layer has
processes of its own. Times include the command's way to the process and back, well below a millisecond.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("pytest_benchmark", reason="pip install '.[bench,test]'")

from cumem_sleep.tools.simulated import open_allocator

_, no_gpu = open_allocator(os.environ)
if no_gpu:
    os.environ["CUMEM_SLEEP_DRIVER"] = "sim"  # of the processes, too

from layers import LAYERS, SIMULATED, NotInstalled  # noqa: E402  they read the environment
from recording import MIB, Process, qwen3_32b_bytes  # noqa: E402

ON = "the simulated driver, whose times mean nothing" if SIMULATED else "a GPU"
WEIGHTS = qwen3_32b_bytes(2, 64) if SIMULATED else qwen3_32b_bytes(8, 1)  # eight decoder layers: 10 GB
KV_BYTES = 64 * MIB
ROUNDS = 3
Measure = Callable[..., None]


class Measured:
    """A layer's current process, with weights in it."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._open = ExitStack()

    def start(self) -> None:
        """In a new process: nothing was backed up yet."""
        self.close()
        self.process = self._open.enter_context(Process(self._layer, time.monotonic() + 500))
        self.process.ask("load", sizes=WEIGHTS, kv_bytes=KV_BYTES)

    def ask(self, *commands: str) -> None:
        for command in commands:
            self.process.ask(command, **({"level": 1} if command == "sleep" else {}))

    def check(self) -> None:
        """Wake it; every weight has its bytes."""
        self.ask("wake")
        assert self.process.ask("check")["differing_tensors"] == []

    def close(self) -> None:
        self._open.close()


@pytest.fixture(params=LAYERS)
def measured(request: pytest.FixtureRequest) -> Iterator[Measured]:
    found = Measured(request.param)
    try:
        found.start()
        yield found
    except NotInstalled as error:
        pytest.skip(str(error))
    finally:
        found.close()


@pytest.fixture
def measure(measured: Measured, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Measures a command; the bandwidth is printed, and kept with the times."""
    benchmark: Any = request.getfixturevalue("benchmark")  # after a layer that is not there was skipped

    def run(command: str, before: Callable[[], None]) -> None:
        benchmark.group = f"{request.function.__name__}, {sum(WEIGHTS) / 1e9:.2f} GB on {ON}"
        benchmark.pedantic(lambda: measured.ask(command), setup=before, rounds=ROUNDS)
        gbps = sum(WEIGHTS) / benchmark.stats.stats.median / 1e9
        benchmark.extra_info.update(gbps=gbps, weights_bytes=sum(WEIGHTS), version=measured.process.version)
        with capsys.disabled():
            print(f"\n{benchmark.name}: {gbps:.2f} GB/s on {ON}")

    return run


def test_first_sleep(measured: Measured, measure: Measure) -> None:
    measure("sleep", before=measured.start)
    measured.check()


def test_sleep_of_changed_weights(measured: Measured, measure: Measure) -> None:
    measured.ask("sleep")
    measure("sleep", before=lambda: measured.ask("wake", "change"))
    measured.check()


def test_wake(measured: Measured, measure: Measure) -> None:
    measure("wake", before=lambda: measured.ask("sleep"))
    measured.ask("sleep")
    measured.check()
