"""The scenarios of several ranks, against engines that do right, and engines that do wrong, which they find."""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the benchmarks' modules; none of them stays."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def ranks(module: Any) -> ModuleType:
    found: ModuleType = module("scenarios.ranks")
    return found


@dataclass
class Engine:
    """`vllm serve` with two ranks, as far as a scenario asks: all of them sleep and wake, or none, but for its faults.

    Attributes:
        wrong: `split` (one rank goes on), `nameless` (the error names nobody), `lies` (about `/is_sleeping`), `tokens`
            (others than before), `stuck` (no retry works).
    """

    log: pathlib.Path
    wrong: str = ""
    asleep: list[bool] = field(default_factory=lambda: [False, False])
    paused: bool = False
    short_of_gpu: int | None = None
    short_of_host: int | None = None
    woken: int = 0

    def __enter__(self) -> Engine:
        self.server = SimpleNamespace(log=self.log)
        self.log.write_text("")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        del method
        if path.startswith("/sleep"):
            self.paused = True
            return self._change(True, self.short_of_host)
        if path == "/wake_up":
            found = self._change(False, self.short_of_gpu)
            self.paused = found[0] != 200
            self.woken += 1
            return found
        if path == "/is_sleeping":
            return 200, {}, {"is_sleeping": self.paused and self.wrong != "lies"}
        assert path == "/collective_rpc"
        return 200, {}, {"results": self._call(body["method"], body.get("args", []))}

    def expect(self, status: int, method: str, path: str, body: Any = None) -> Any:
        found, _, content = self.ask(method, path, body)
        assert found == status, (path, content)
        return content

    def tokens(self, _prompt: list[int]) -> tuple[int, Any]:
        return (503, "asleep") if self.paused else (200, [1, self.woken if self.wrong == "tokens" else 2])

    def _change(self, asleep: bool, failing: int | None) -> tuple[int, dict[str, str], Any]:
        if failing is None and not (self.wrong == "stuck" and "failed" in self.log.read_text()):
            self.asleep = [asleep] * 2
            return 200, {}, None
        if self.wrong == "split":
            self.asleep[1 - (failing or 0)] = asleep
        with self.log.open("a") as log:
            log.write("a call failed\n" if self.wrong == "nameless" else f"wake_up: rank {failing} of 2 failed: x\n")
        return 500, {}, "Internal Server Error"

    def _call(self, method: str, arguments: list[str]) -> list[Any]:
        if method == "limit_host_memory":
            self.short_of_host = int(arguments[0]) if arguments[1] else None
        usage = [{"weights": {"segments": 2, "asleep_segments": 2 * is_asleep}} for is_asleep in self.asleep]
        return [{"rank": rank, "usage": usage[rank]} for rank in range(2)]


def play(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, name: str, wrong: str) -> Any:
    engine = Engine(folder / "log", wrong)

    @contextlib.contextmanager
    def gpu_is_full(gpu: int) -> Iterator[None]:
        engine.short_of_gpu = gpu
        yield
        engine.short_of_gpu = None

    monkeypatch.setattr(ranks, "GatedServer", lambda *_: engine)
    monkeypatch.setattr(ranks, "gpu_is_full", gpu_is_full)
    return getattr(ranks, name)(folder / "model")


SCENARIOS = ("rank_without_device_memory", "rank_without_host_memory")


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_engine_that_does_right_passes(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    facts = play(ranks, monkeypatch, tmp_path, name, "")
    assert [answer[1:3] for answer in facts["answers"]] == [[1, 500], [0, 500]]
    assert any("rank 1 of 2" in line for line in facts["errors"])
    assert json.dumps(facts)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("split", "no rank went on"),
        ("nameless", "the error names rank 1"),
        ("lies", "what it says is so"),
        ("tokens", "tokens after the retry"),
        ("stuck", "Internal Server Error"),
    ],
)
def test_an_engine_that_does_wrong_fails(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str, wrong: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        play(ranks, monkeypatch, tmp_path, name, wrong)


class Llm:
    """Two ranks in the hands of vLLM's `LLM`; `left` bytes stay on a GPU, and `lazy` ranks do not sleep."""

    def __init__(self, left: int = 2 << 30, lazy: int = 0) -> None:
        self.left, self.lazy = left, lazy
        self.asleep = False
        self.counts = {"sleep": 0, "wake": 0}

    def sleep(self, level: int) -> None:
        del level
        self.asleep = True
        self.counts["sleep"] += 1

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = False
        self.counts["wake"] += tags is None or "weights" in tags

    def reset_prefix_cache(self) -> None:
        pass

    def collective_rpc(self, method: str) -> Any:
        if method == "reload_weights":
            return None
        return [
            {
                "rank": rank,
                "devices": [rank],
                "device_used_bytes": self.left if self.asleep else 100 << 30,
                "usage": {"weights": {"segments": 3, "asleep_segments": 3 * self.asleep - self.asleep * self.lazy}},
                "operations": {
                    name: {"phases": {"agree": count * (0.001 + rank)}} for name, count in self.counts.items()
                },
            }
            for rank in range(2)
        ]


@pytest.fixture
def parallel(module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found: ModuleType = module("scenarios.parallel")
    monkeypatch.setattr(found, "tokens", lambda _: [[1, 2]])
    return found


def test_cycles_of_ranks_say_what_agreeing_cost(parallel: ModuleType) -> None:
    facts: dict[str, Any] = {}
    parallel.cycles_of_ranks(Llm(), facts, is_alone=True)
    assert facts["levels"] == [1, 1, 2, 1]
    assert facts["bytes left asleep, by rank"] == [[2 << 30] * 2] * 4
    assert facts["sleep: agreeing ms, by rank"] == [[1.0, 1001.0]] * 4
    assert facts["wake: agreeing ms, by rank"] == [[1.0, 1001.0]] * 4


@pytest.mark.parametrize(("llm", "said"), [(Llm(lazy=1), "all ranks sleep"), (Llm(left=5 << 30), "little is left")])
def test_ranks_that_do_not_sleep_are_found(parallel: ModuleType, llm: Llm, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        parallel.cycles_of_ranks(llm, {}, is_alone=True)


def test_without_ray_the_scenario_says_so(
    parallel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Exception, match="ray is not installed") as raised:
        parallel.tensor_parallel_2_on_ray(tmp_path)
    assert type(raised.value).__name__ == "NotHere"


def test_what_is_not_run_is_told_apart(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = module("vllm_scenarios")
    outcomes = {
        "a": {"passed": True},
        "b": {"passed": False, "not_run": "no ray"},
        "c": {"passed": False, "error": "x"},
    }
    print(*scenarios.table(outcomes), sep="\n")
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["passed", "NOT", "no", "FAILED", "x"]
    assert [scenarios.failed(outcome) for outcome in outcomes.values()] == [False, False, True]
    machine = {"machine": {"vllm": "0", "gpu": "A GPU"}}
    tables = module("result_tables")
    page = tables.scenarios_table({"scenarios": {n: {**o, **machine, "says": "It."} for n, o in outcomes.items()}})
    assert page[-3:] == ["| a | It. |", "| b | It. **Not run**: no ray. |", "| c | It. **Failed.** |"]


def test_a_mixture_of_experts_is_what_vllm_reads(module: Any) -> None:
    """Names and sizes are those that vLLM's Qwen3-MoE loads."""
    shape = module("checkpoints").SHAPES["MoE"]
    config = shape.config()
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] == 16 > config["num_experts_per_tok"]
    layer = shape.shards()["model-layer03.safetensors"]
    assert layer["model.layers.3.mlp.gate.weight"] == (16, 1024)
    assert layer["model.layers.3.mlp.experts.15.down_proj.weight"] == (1024, 768)
    assert not any(".mlp.gate_proj" in name for name in layer)
    assert "num_experts" not in module("checkpoints").SHAPES["8B"].config()


class Worker:
    """vLLM's, with what the extension gives it."""

    rank = 1


def test_one_rank_is_limited_and_the_others_are_not(module: Any, allocator: Any) -> None:
    from cumem_sleep import OutOfHostMemory

    extension = module("worker_extension").Extension
    worker = type("Both", (extension, Worker), {})()
    allocator.malloc(4 << 20, "weights")
    worker.limit_host_memory("0", "1")
    allocator.sleep()
    allocator.wake_up()
    worker.forget_backups()
    worker.limit_host_memory("1", "1")
    with pytest.raises(OutOfHostMemory):
        allocator.sleep()
    worker.limit_host_memory("1", "")
    allocator.sleep()
    allocator.wake_up()
    assert worker.process_id() > 0
