"""Sleep and wake of a 32B model's memory by this layer, by vLLM's own and by torch_memory_saver, in one run.

    pytest benchmarks/test_peers.py --benchmark-json=peers.json

Needs a GPU of 128 GiB or more and 80 GiB of host memory, or `--scale 4`. A layer that is not installed is skipped, and
both the summary and the JSON say so. On an H200 all four take about eight minutes (`--deadline`): a first sleep of
vLLM's lasts 30 s, every sleep of torch_memory_saver's 20 s unless it retains its backups.

The layers run before the first test (`recording.py`), one process after the other. The tests hand pytest-benchmark the
seconds that these processes measured: its clock here stands still but for them, so its rounds are theirs.
"""

from __future__ import annotations

from typing import Any

import pytest
from layers import LAYERS
from recording import FIRST_SLEEP, HOOKS, LINK, SLEEP_2, STEPS, WAKE_2, Record, Recording

_elapsed_s = 0.0


def measured_seconds() -> float:
    """The clock that pytest-benchmark reads."""
    return _elapsed_s


pytestmark = [pytest.mark.benchmark(timer=measured_seconds, warmup=False), pytest.mark.timeout(0)]


def replay(benchmark: Any, seconds: list[float]) -> None:
    """Each of them becomes one round."""
    rounds = iter(seconds)

    def advance() -> None:
        global _elapsed_s
        _elapsed_s += next(rounds)

    def reset() -> None:
        global _elapsed_s
        _elapsed_s = 0.0

    benchmark.pedantic(advance, setup=reset, rounds=len(seconds))


def chosen(config: pytest.Config) -> list[str]:
    layers: list[str] = config.getoption("layers").split(",")
    return layers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layer" not in metafunc.fixturenames:
        return
    layers = chosen(metafunc.config)
    if "step" in metafunc.fixturenames:
        pairs = [(step, layer) for step in (*STEPS, *HOOKS) for layer in layers if _has(layer, step)]
        metafunc.parametrize("step, layer", pairs, ids=[f"{step}-{layer}" for step, layer in pairs])
    else:
        metafunc.parametrize("layer", layers)


def _has(layer: str, step: str) -> bool:
    return step not in (SLEEP_2, WAKE_2) or 2 in LAYERS[layer].levels


def record_of(recording: Recording, layer: str) -> Record:
    record = recording.records[layer]
    if record.not_installed is not None:
        pytest.skip(record.not_installed)
    return record


@pytest.mark.parametrize("direction", LINK)
def test_link(benchmark: Any, recording: Recording, direction: str) -> None:
    if direction not in recording.link:
        pytest.fail(recording.machine_error, pytrace=False)
    benchmark.group = "link"
    benchmark.extra_info["bytes"] = recording.workload.link_bytes
    replay(benchmark, recording.link[direction])


def test_step(benchmark: Any, recording: Recording, step: str, layer: str) -> None:
    record = record_of(recording, layer)
    if step not in record.seconds:
        pytest.fail(f"not reached: {record.error}", pytrace=False)
    benchmark.group = step
    benchmark.extra_info.update(layer=layer, step=step)
    replay(benchmark, record.seconds[step])


def test_every_byte_came_back(recording: Recording, layer: str) -> None:
    record = record_of(recording, layer)
    if record.error is not None:
        pytest.fail(record.error, pytrace=False)
    assert record.wakes_checked >= len(record.seconds[FIRST_SLEEP])
