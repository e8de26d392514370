"""Options of `test_peers.py`, and what its result says beside the figures."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from layers import LAYERS
from recording import GIB, Recording, Workload, qwen3_32b_bytes

KV_BYTES = int(54.63 * GIB)

_recording = pytest.StashKey[Recording]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers", "sleep-mode layers side by side")
    group.addoption("--layers", default=",".join(LAYERS), help="which, comma-separated (default: %(default)s)")
    group.addoption("--decoder-layers", type=int, default=64, help="of the 32B model (default: %(default)s)")
    group.addoption("--scale", type=int, default=1, help="divide every tensor's size and the KV cache's by this")
    group.addoption("--processes", type=int, default=3, help="first sleeps per layer, at most (default: %(default)s)")
    group.addoption("--rounds", type=int, default=3, help="later sleeps and wakes, at most (default: %(default)s)")
    group.addoption("--pause", type=float, default=3.0, help="seconds before a late wake (default: %(default)s)")
    group.addoption("--deadline", type=float, default=480, help="seconds; then no more processes (%(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, where it is installed")
    unknown = set(config.getoption("layers").split(",")) - set(LAYERS)
    if unknown:
        raise pytest.UsageError(f"--layers {','.join(sorted(unknown))}: there are {', '.join(LAYERS)}")


@pytest.fixture(scope="session")
def recording(pytestconfig: pytest.Config) -> Recording:
    """Every chosen layer, measured: minutes. Layers that fail or are not installed say so in their record."""
    option = pytestconfig.getoption
    scale = option("scale")
    workload = Workload(
        sizes=qwen3_32b_bytes(option("decoder_layers"), scale),
        kv_bytes=KV_BYTES // scale // 512 * 512,
        processes=option("processes"),
        rounds=option("rounds"),
        pause_s=option("pause"),
        deadline_s=option("deadline"),
        link_bytes=8 * GIB // scale,
        hook_segments=max(500 // scale, 10),
    )
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end="", file=sys.stderr, flush=True)

    result = Recording(workload, say)
    pytestconfig.stash[_recording] = result
    result.run(option("layers").split(","))
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    del machine_info["node"]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    for key in ("project", "branch", "error"):
        commit_info.pop(key, None)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Beside the figures: the machine, what was put to sleep, and what became of each layer."""
    recording = config.stash.get(_recording, None)
    if recording is None:
        return
    arguments = [Path(argument).name if "/" in argument else argument for argument in config.invocation_params.args]
    workload = recording.workload
    output_json["machine"] = {**recording.machine, "command": " ".join(["pytest", *arguments])}
    output_json["workload"] = {
        "segments": len(workload.sizes),
        "weights_bytes": workload.weights_bytes,
        "kv_cache_bytes": workload.kv_bytes,
        "link_bytes": workload.link_bytes,
    }
    output_json["layers"] = {
        name: {"title": LAYERS[name].title, "levels": LAYERS[name].levels, **dataclasses.asdict(record)}
        for name, record in recording.records.items()
    }
    for layer in output_json["layers"].values():
        del layer["seconds"]  # they are the benchmarks' data


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    recording = config.stash.get(_recording, None)
    if recording is None:
        return
    terminalreporter.section("layers")
    terminalreporter.write_line(f"machine and link: {recording.machine_error or 'measured'}")
    for name, record in recording.records.items():
        terminalreporter.write_line(f"{name} {record.version or ''}: {record.state}")
