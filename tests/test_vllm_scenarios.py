"""`benchmarks/vllm_scenarios.py`: servers and engines that do wrong are found, and when it is ended nothing goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = pytest.mark.sim


class Served:
    """`vllm serve` behind the gate, as far as a scenario asks."""

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        raise NotImplementedError

    def expect(self, status: int, method: str, path: str, body: Any = None) -> Any:
        found, _, content = self.ask(method, path, body)
        assert found == status, (path, content)
        return content


def play(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, name: str, server: Any
) -> dict[str, Any]:
    """A scenario with this server; another process that takes a GPU's memory is noted in `server.full_gpu`."""

    @contextlib.contextmanager
    def gpu_is_full(gpu: int) -> Iterator[None]:
        server.full_gpu = gpu
        yield
        server.full_gpu = None

    monkeypatch.setattr(module, "GatedServer", lambda *_: server)
    monkeypatch.setattr(module, "gpu_is_full", gpu_is_full)
    facts: dict[str, Any] = getattr(module, name)(folder / "model")
    assert json.dumps(facts)
    return facts


# Two ranks: both, or neither


@pytest.fixture
def ranks(benchmark_module: Any) -> ModuleType:
    found: ModuleType = benchmark_module("scenarios.ranks")
    return found


@dataclass
class Engine(Served):
    """`vllm serve` with two ranks, as far as a scenario asks: all of them sleep and wake, or none, but for its faults.

    Attributes:
        wrong: `split` (one rank goes on), `nameless` (the error names nobody), `lies` (about `/is_sleeping`), `tokens`
            (others than before), `stuck` (no retry works).
        told_of_nccl: how many ranks say what NCCL takes when they fall asleep.
    """

    log: pathlib.Path
    wrong: str = ""
    asleep: list[bool] = field(default_factory=lambda: [False, False])
    paused: bool = False
    full_gpu: int | None = None
    short_of_host: int | None = None
    woken: int = 0
    told_of_nccl: int = 2

    def __enter__(self) -> Engine:
        self.server = SimpleNamespace(log=self.log)
        self.log.write_text("")
        return self

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        del method
        if path.startswith("/sleep"):
            self.paused = True
            with self.log.open("a") as log:
                log.write("2.00 GiB left on the GPU (about 1.00 GiB NCCL, 1.00 GiB the rest); x\n" * self.told_of_nccl)
            return self._change(True, self.short_of_host)
        if path == "/wake_up":
            found = self._change(False, self.full_gpu)
            self.paused = found[0] != 200
            self.woken += 1
            return found
        if path == "/is_sleeping":
            return 200, {}, {"is_sleeping": self.paused and self.wrong != "lies"}
        assert path == "/collective_rpc"
        return 200, {}, {"results": self._call(body["method"], body.get("args", []))}

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


SCENARIOS = ("rank_without_device_memory", "rank_without_host_memory")


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_engine_that_does_right_passes(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    facts = play(ranks, monkeypatch, tmp_path, name, Engine(tmp_path / "log"))
    assert [answer[1:3] for answer in facts["answers"]] == [[1, 500], [0, 500]]
    assert any("rank 1 of 2" in line for line in facts["errors"])


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
        play(ranks, monkeypatch, tmp_path, name, Engine(tmp_path / "log", wrong))


class Mortal(Engine):
    """One whose rank 1 is a process: it may be stopped, and killed."""

    def __enter__(self) -> Engine:
        self.rank_1 = subprocess.Popen(["sleep", "600"])
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self.rank_1.kill()
        self.rank_1.wait()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        if path in ("/health", "/v1/completions"):
            is_well = (self._state() != "Z" and self.wrong != "ill") or self.wrong == "undead"
            return (200 if is_well else 503), {}, "well" if is_well else "the engine is dead"
        if path == "/wake_up" and self._state() == "T":
            with self.log.open("a") as log:
                log.write("wake_up: rank 1 of 2 did not begin within 5 s (CUMEM_SLEEP_AGREEMENT_TIMEOUT_S)\n")
            while self._state() not in ("S", "Z"):  # it goes on, or is gone; dying takes a moment
                time.sleep(0.01)
            if self._state() == "Z":
                raise ConnectionResetError
            return super()._change(False, 1)
        return super().ask(method, path, body)

    def _state(self) -> str:
        return pathlib.Path(f"/proc/{self.rank_1.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _call(self, method: str, arguments: list[str]) -> list[Any]:
        return ["1", str(self.rank_1.pid)] if method == "process_id" else super()._call(method, arguments)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", ""),
        ("silent", "NCCL has an item"),
        ("split", "no rank is awake"),
        ("ill", "the engine is dead"),
        ("undead", "the server says that it is not well"),
    ],
)
def test_a_rank_is_stopped_and_killed(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, wrong: str, said: str
) -> None:
    engine = Mortal(tmp_path / "log", wrong, told_of_nccl=1 if wrong == "silent" else 2)
    monkeypatch.setattr(ranks, "GatedServer", lambda *_: engine)
    monkeypatch.setattr(ranks, "ILL_WITHIN_S", 0.2)
    expected = pytest.raises(AssertionError, match=said) if said else contextlib.nullcontext()
    with expected:
        facts = ranks.rank_stopped_and_killed(tmp_path / "model")
        assert facts["answer of the wake whose rank was killed"][0] == 0
    assert engine.rank_1.returncode is not None


FAKE_TORCH = """
import os
class cuda:
    mem_get_info = staticmethod(lambda: (1 << 30, 2 << 30))
uint8 = None
def empty(nbytes, dtype, device):
    open(os.environ["TOOK"], "w").write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {nbytes}")
"""


def test_another_process_takes_what_the_gpu_has(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TOOK", str(tmp_path / "took"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with ranks.gpu_is_full(1):
        assert (tmp_path / "took").read_text() == f"5 {(1 << 30) - ranks.LEFT_BYTES}"


class Replica(Engine):
    """A server whose first sleep copies, or finds what another one has copied."""

    slept: ClassVar[list[Replica]] = []

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        if path.startswith("/sleep") and self not in self.slept:
            self.slept.append(self)
        return super().ask(method, path, body)

    def _call(self, method: str, arguments: list[str]) -> list[Any]:
        del arguments
        if method == "weights_by_segment":
            assert not any(self.asleep)
            return [[{"bytes": 4 << 20, "sums": [1, 2, self.slept.index(self), 4], "tensors": ["int32 [16, 9]"]}]]
        finds = self.slept.index(self) > 0 and self.wrong != "copies"
        return [{"operations": {"sleep": {"bytes": {"copied": 10 * (not finds), "found": 10 * finds}}}}]


@pytest.mark.parametrize("name", ["two_servers_through_the_vault", "replicas_on_two_gpus"])
@pytest.mark.parametrize(
    ("wrong", "held", "said"),
    [
        ("", 10, ""),
        ("copies", 10, r"the second finds what the first has copied.* 1 MiB differ \(2 to 2\), .*int32 \[16, 9\]"),
        ("", 20, "one copy is kept"),
    ],
)
def test_two_servers_of_one_model_share_one_copy(
    benchmark_module: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    name: str,
    wrong: str,
    held: int,
    said: str,
) -> None:
    class Vault(contextlib.nullcontext[Any]):
        socket = "/vault.sock"

        def __init__(self, nbytes: int) -> None:
            super().__init__(self)
            assert nbytes == 4 << 30

        def wait_until_pinned(self) -> float:
            return 1.0

        def status(self) -> dict[str, Any]:
            return {"asleep_bytes": held}

    scenarios = benchmark_module("scenarios.vault")
    Replica.slept = []
    monkeypatch.setattr(benchmark_module("vault_process"), "Vault", Vault)
    monkeypatch.setattr(scenarios, "GatedServer", lambda _folder, log, *_: Replica(tmp_path / log, wrong))
    for variable in ("CUMEM_SLEEP_VAULT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "")  # put back at the end
    expected = pytest.raises(AssertionError, match=said) if said else contextlib.nullcontext()
    with expected:
        assert json.dumps(getattr(scenarios, name)(tmp_path / "model"))


@pytest.mark.parametrize("name", ["two_servers_through_the_vault", "replicas_on_two_gpus"])
def test_what_the_sampler_keeps_among_the_weights_is_little(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    """It differs from server to server: counts of tokens, four bytes for each token of the vocabulary and request."""

    class Asked(Exception):
        pass

    def server(_folder: pathlib.Path, _log: str, _port: int, *options: str) -> None:
        given = dict(zip(options[::2], options[1::2], strict=True))
        shape = benchmark_module("checkpoints").SHAPES["0.6B"]
        counts_bytes = int(given.get("--max-num-seqs", 1024)) * shape.vocabulary * 4
        assert counts_bytes < shape.weights_bytes / 100
        raise Asked

    scenarios = benchmark_module("scenarios.vault")
    vault = contextlib.nullcontext(SimpleNamespace(socket="", wait_until_pinned=lambda: 1.0))
    monkeypatch.setattr(benchmark_module("vault_process"), "Vault", lambda _: vault)
    monkeypatch.setattr(scenarios, "GatedServer", server)
    for variable in ("CUMEM_SLEEP_VAULT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "")  # put back at the end
    with pytest.raises(Asked):
        getattr(scenarios, name)(tmp_path / "model")


@pytest.mark.parametrize(("left", "said"), [([2 << 30, 2 << 30], ""), ([2 << 30, 90 << 30], "both have given")])
def test_both_engines_of_data_parallel_2_have_to_sleep(
    parallel: ModuleType,
    benchmark_module: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    left: list[int],
    said: str,
) -> None:
    class TwoEngines(Engine):
        def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
            return (200, {}, None) if path.startswith("/re") else super().ask(method, path, body)

    monkeypatch.setattr(parallel, "GatedServer", lambda *_: TwoEngines(tmp_path / "log"))
    monkeypatch.setattr(benchmark_module("model_server"), "gpu_memory_in_use_bytes", lambda gpu: left[gpu])
    expected = pytest.raises(AssertionError, match=said) if said else contextlib.nullcontext()
    with expected:
        facts = parallel.data_parallel_2(tmp_path / "model")
        assert facts["bytes left asleep, by GPU"] == [left] * 3


class Llm:
    """Two ranks in the hands of vLLM's `LLM`.

    Attributes:
        left: what stays on a GPU, of all processes.
        own: what stays of a rank's own, if NVML lists it.
        lazy: segments that do not sleep.
        forgets: the weights of rank 1 are not loaded after level 2.
    """

    def __init__(self, left: int = 2 << 30, lazy: int = 0, own: int | None = None, forgets: bool = False) -> None:
        self.left, self.lazy, self.own, self.forgets = left, lazy, own, forgets
        self.asleep = False
        self.has_weights = True
        self.counts = {"sleep": 0, "wake": 0}

    def sleep(self, level: int) -> None:
        self.has_weights = self.has_weights and not (level == 2 and self.forgets)
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
        if method == "gpu_memory_bytes":
            return [self.own] * 2
        if method == "sums_of_parameters":
            return [{"a": 1, "b": 2}, {"a": 3, "b": 4 * self.has_weights}]
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
def parallel(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found: ModuleType = benchmark_module("scenarios.parallel")
    monkeypatch.setattr(found, "tokens", lambda _: [[1, 2]])
    return found


def test_cycles_of_ranks_say_what_agreeing_cost(parallel: ModuleType) -> None:
    facts: dict[str, Any] = {}
    parallel.cycles_of_ranks(Llm(), facts, is_alone=True)
    assert facts["levels"] == [1, 1, 2, 1]
    assert facts["bytes left asleep, by rank"] == [[2 << 30] * 2] * 4
    assert facts["sleep: agreeing ms, by rank"] == [[1.0, 1001.0]] * 4
    assert facts["wake: agreeing ms, by rank"] == [[1.0, 1001.0]] * 4


@pytest.mark.parametrize(
    ("llm", "said"),
    [
        (Llm(lazy=1), "all ranks sleep"),
        (Llm(left=5 << 30), "little is left"),
        (Llm(own=5 << 30), "little is left"),
        (Llm(forgets=True), r"weights after level 2: \['b'\] of 1 differ"),
    ],
)
def test_ranks_that_do_not_sleep_are_found(parallel: ModuleType, llm: Llm, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        parallel.cycles_of_ranks(llm, {}, is_alone=True)


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("own", [1 << 30, None])
def test_what_others_have_on_the_gpu_is_not_what_a_rank_leaves(
    parallel: ModuleType, is_alone: bool, own: int | None
) -> None:
    """Where nobody can tell them apart, nothing is said, unless the engine is alone."""
    facts: dict[str, Any] = {}
    parallel.cycles_of_ranks(Llm(left=28 << 30 if own else 3 << 30, own=own), facts, is_alone=is_alone)
    expected = [own] * 2 if own else [3 << 30] * 2 if is_alone else None
    assert facts.get("bytes left asleep, by rank") == (expected and [expected] * 4)


def test_memory_of_one_process_is_what_nvml_lists(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [SimpleNamespace(pid=7, usedGpuMemory=9 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)]
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1": "a GPU"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda handle: listed if handle == "a GPU" else [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    of = benchmark_module("model_server").gpu_memory_of_process_bytes
    assert [of("GPU-1", process) for process in (7, 8, 9)] == [9 << 30, None, None]

    def fails() -> None:
        raise OSError

    nvml.nvmlInit = fails
    assert of("GPU-1", 7) is None


def test_a_worker_says_what_its_own_process_has(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    properties = SimpleNamespace(uuid="a3d9fea7")
    cuda = SimpleNamespace(current_device=lambda: 1, get_device_properties=lambda device: device == 1 and properties)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(
        benchmark_module("model_server"), "gpu_memory_of_process_bytes", lambda *of: asked.append(of) or 5
    )
    assert benchmark_module("worker_extension").Extension().gpu_memory_bytes() == 5
    assert asked == [("GPU-a3d9fea7", os.getpid())]


def test_each_segment_with_weights_is_described(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, allocator: Any
) -> None:
    extension = benchmark_module("worker_extension")
    monkeypatch.setattr(extension, "sums_of_mib", lambda _address, nbytes: [7] * (nbytes >> 20))
    monkeypatch.setattr(extension, "tensors_in", lambda segment: [f"of {segment.bytes}"])
    for nbytes, tag in ((4 << 20, "weights"), (8 << 20, "kv_cache"), (6 << 20, "weights")):
        allocator.malloc(nbytes, tag)
    found = extension.Extension().weights_by_segment()
    assert [(each["bytes"], len(each["sums"]), each["tensors"]) for each in found] == [
        (4 << 20, 4, [f"of {4 << 20}"]),
        (6 << 20, 6, [f"of {6 << 20}"]),
    ]


def test_tokens_that_do_not_repeat_without_a_sleep(parallel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They prove nothing then. If vLLM alone does not repeat them either, the weights are the proof."""
    each = iter(range(100))
    monkeypatch.setattr(parallel, "tokens", lambda _: [[1, 2], [next(each)]])
    with pytest.raises(AssertionError, match=r"tokens repeat without a sleep, those of prompts \[1\] do not"):
        parallel.cycles_of_ranks(Llm(), {}, is_alone=True)
    parallel.cycles_of_ranks(Llm(), {}, is_alone=True, tokens_repeat=False)
    with pytest.raises(AssertionError, match="weights after level 2"):
        parallel.cycles_of_ranks(Llm(forgets=True), {}, is_alone=True, tokens_repeat=False)


def test_without_ray_the_scenario_says_so(
    parallel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Exception, match="ray is not installed") as raised:
        parallel.tensor_parallel_2_on_ray(tmp_path)
    assert type(raised.value).__name__ == "NotHere"


def test_what_is_not_run_is_told_apart(benchmark_module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = benchmark_module("vllm_scenarios")
    outcomes = {
        "a": {"passed": True},
        "b": {"passed": False, "not_run": "no ray"},
        "c": {"passed": False, "error": "x"},
    }
    print(*scenarios.table(outcomes), sep="\n")
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["passed", "NOT", "no", "FAILED", "x"]
    assert [scenarios.failed(outcome) for outcome in outcomes.values()] == [False, False, True]
    table = benchmark_module("measured.scenarios").table
    machine = {"machine": {"vllm": "0", "gpu": "A GPU"}}
    outcomes["d"] = {"passed": False, "error": "x", "why": "the other GPU was full"}
    page = table({"scenarios": {n: {**o, **machine, "says": "It."} for n, o in outcomes.items()}})
    assert page[-4:] == [
        "| a | It. |",
        "| b | It. **Not run**: no ray. |",
        "| c | It. **Failed.** |",
        "| d | It. **Failed**: the other GPU was full. |",
    ]


def test_a_mixture_of_experts_is_what_vllm_reads(benchmark_module: Any) -> None:
    """Names and sizes are those that vLLM's Qwen3-MoE loads."""
    shape = benchmark_module("checkpoints").SHAPES["MoE"]
    config = shape.config()
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] == 16 > config["num_experts_per_tok"]
    layer = shape.shards()["model-layer03.safetensors"]
    assert layer["model.layers.3.mlp.gate.weight"] == (16, 1024)
    assert layer["model.layers.3.mlp.experts.15.down_proj.weight"] == (1024, 768)
    assert not any(".mlp.gate_proj" in name for name in layer)
    assert "num_experts" not in benchmark_module("checkpoints").SHAPES["8B"].config()


class Worker:
    """vLLM's, with what the extension gives it."""

    rank = 1


def test_one_rank_is_limited_and_the_others_are_not(benchmark_module: Any, allocator: Any) -> None:
    from cumem_sleep import OutOfHostMemory

    extension = benchmark_module("worker_extension").Extension
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


# Level 3


class Level3Server(Served):
    """A sleep goes to level 3 when its metrics are asked.

    Attributes:
        wrong: what it does wrong.
    """

    def __init__(self, wrong: str, ranks: int, wakes_on_request: bool) -> None:
        self.wrong, self.ranks, self.wakes_on_request = wrong, ranks, wakes_on_request
        self.level = 0
        self.full_gpu: int | None = None
        self.is_half_way = False
        self.woken = 0

    def __enter__(self) -> Level3Server:
        return self

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        del method, body
        if path.startswith("/sleep"):
            self.level = 3 if self.wrong == "goes deeper" and path.endswith("3") else 1
            why = "it has 2 ranks" if self.wrong != "no reason" else "no"
            return 200, {}, {"level": self.level, "why_not_deeper": why}
        if path == "/metrics":
            deepens = self.wrong != "stays" if self.ranks == 1 else self.wrong == "deepens"
            if deepens and self.level == 1 and not self.is_half_way:
                self.level = 3
            each = [1, 3] if self.wrong == "splits" and self.level else [self.level] * self.ranks
            lines = [f'cumem_sleep_sleep_level{{rank="{rank}"}} {level}.0' for rank, level in enumerate(each)]
            return 200, {}, "\n".join(["# HELP", *lines] if self.wrong != "no metrics" else [])
        if path == "/is_sleeping":
            return 200, {}, {"is_sleeping": self.level > 0 and self.wrong != "lies"}
        if path == "/collective_rpc":
            asleep = self.level > 0 and self.wrong != "awake"
            usage = {"weights": {"segments": 2, "asleep_segments": 2 * asleep}}
            return 200, {}, {"results": [{"usage": usage}] * self.ranks}
        assert path == "/wake"
        if self.full_gpu is not None and self.wrong != "wakes without room":
            if self.wrong == "half way":
                self.level, self.is_half_way = 1, True
            return 503, {}, "out of luck" if self.wrong == "says nothing" else "OutOfDeviceMemory: 1 GiB is missing"
        if self.wrong == "stuck" and self.woken == 0:
            return 500, {}, "no"
        self._wake()
        return 200, {}, None

    def tokens(self, _prompt: list[int]) -> tuple[int, Any]:
        if self.level and not self.wakes_on_request:
            return 503 if self.wrong != "answers asleep" else 200, "asleep"
        if self.level:
            self._wake()
        return 200, [1, self.woken if self.wrong == "tokens" else 2]

    def _wake(self) -> None:
        self.level = 0
        self.woken += 1


@pytest.fixture
def play_level_3(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    level_3 = benchmark_module("scenarios.level_3")
    monkeypatch.setattr(level_3, "DEEP_AFTER_S", 0.0)
    monkeypatch.setattr(level_3, "DEEP_WITHIN_S", 0.0)

    def play_it(name: str, wrong: str) -> dict[str, Any]:
        of_two = name == "level_3_of_two_ranks"
        server = Level3Server(wrong, ranks=2 if of_two else 1, wakes_on_request=of_two)
        return play(level_3, monkeypatch, tmp_path, name, server)

    return play_it


def test_servers_that_do_right_at_level_3_pass(play_level_3: Any) -> None:
    facts = play_level_3("level_3_of_two_ranks", "")
    assert facts["answer"]["why_not_deeper"] == "it has 2 ranks"
    assert facts["levels after some time"] == [1, 1]
    facts = play_level_3("level_3_with_little_memory", "")
    assert facts["answer without room"] == [503, "OutOfDeviceMemory: 1 GiB is missing"]
    assert len(facts["retry s"]) == len(facts["until it is at level 3, s"]) == 2


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("level_3_of_two_ranks", "goes deeper", "it stays at level 1"),
        ("level_3_of_two_ranks", "no reason", "names the ranks"),
        ("level_3_of_two_ranks", "awake", "all ranks sleep"),
        ("level_3_of_two_ranks", "deepens", "it stays at level 1"),
        ("level_3_of_two_ranks", "splits", "it stays at level 1"),
        ("level_3_of_two_ranks", "no metrics", "metrics say the level"),
        ("level_3_of_two_ranks", "tokens", "tokens of a request that wakes it"),
        ("level_3_with_little_memory", "stays", "it goes to level 3"),
        ("level_3_with_little_memory", "wakes without room", "the wake fails"),
        ("level_3_with_little_memory", "says nothing", "says what is missing"),
        ("level_3_with_little_memory", "half way", "it is at level 3 still"),
        ("level_3_with_little_memory", "lies", "and says that it sleeps"),
        ("level_3_with_little_memory", "answers asleep", "a request is rejected"),
        ("level_3_with_little_memory", "stuck", "no"),
        ("level_3_with_little_memory", "tokens", "tokens after the retry"),
    ],
)
def test_servers_that_do_wrong_at_level_3_are_found(play_level_3: Any, name: str, wrong: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        play_level_3(name, wrong)


# The command

# A scenario that starts a server in a session of its own, as they do.
SCRIPT = """
import pathlib, subprocess, sys, time, types

sys.path.insert(0, {benchmarks!r})
import checkpoints, record, vllm_scenarios

checkpoints.write_checkpoint = lambda *_: None
record.machine = dict
vllm_scenarios.version = lambda _: "none"
vllm_scenarios.LIMIT_S = {limit_s}
vllm_scenarios.__file__ = __file__
vllm_scenarios.SCENARIOS.clear()

class Popen(subprocess.Popen):
    "A scenario, whose time begins when it does: on a busy machine it is long in coming."

    def wait(self, timeout=None):
        while timeout and self.poll() is None and not pid.exists():
            time.sleep(0.01)
        return super().wait(timeout)

pid = pathlib.Path({pid!r})
vllm_scenarios.subprocess = types.SimpleNamespace(**{{**vars(subprocess), "Popen": Popen}})

@vllm_scenarios.scenario(alone={alone})
def serves(folder):
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pid.with_suffix(".new").write_text(str(server.pid))
    pid.with_suffix(".new").rename(pid)
    time.sleep(600)

if __name__ == "__main__":
    vllm_scenarios.main()
"""


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_scenario_that_takes_longer_has_a_limit_of_its_own(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for module, name, value in (
        ("checkpoints", "write_checkpoint", lambda *_: None),
        ("record", "machine", dict),
        ("model_server", "exit_on_sigterm", lambda: None),
        ("vllm_scenarios", "version", lambda _: "none"),
    ):
        monkeypatch.setattr(benchmark_module(module), name, value)
    scenarios = benchmark_module("vllm_scenarios")
    limits: dict[str, float] = {}

    def run(name: str, _work: pathlib.Path, _logs: pathlib.Path, limit_s: float) -> dict[str, object]:
        limits[name] = limit_s
        return {"passed": True}

    monkeypatch.setattr(scenarios, "run_in_process", run)
    names = ["pipeline_parallel_2", "expert_parallel_2", "ranks_agree"]
    command = ["x", "--out", str(tmp_path / "out.json"), "--work", str(tmp_path), "--limit", "150"]
    monkeypatch.setattr(sys, "argv", [*command, "--only", ",".join(names)])
    with pytest.raises(SystemExit, match="False"):
        scenarios.main()
    assert limits == {"pipeline_parallel_2": 150, "expert_parallel_2": 240, "ranks_agree": 240}


@pytest.mark.slow
@pytest.mark.parametrize(("alone", "limit_s"), [(True, 100), (False, 100), (False, 1)])
def test_nothing_is_left(tmp_path: pathlib.Path, alone: bool, limit_s: int) -> None:
    script, pid_file = tmp_path / "scenarios.py", tmp_path / "pid"
    script.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS), limit_s=limit_s, alone=alone, pid=str(pid_file)))
    command = [sys.executable, str(script), "--out", str(tmp_path / "out.json"), "--work", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server = 0
    try:
        ends_at = time.monotonic() + 200
        while not pid_file.is_file() and time.monotonic() < ends_at:
            time.sleep(0.05)
        server = int(pid_file.read_text())
        if limit_s > 1:
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == (1 if limit_s == 1 else 143)
        assert limit_s > 1 or "no result in time" in said
        while lives(server) and time.monotonic() < ends_at:
            time.sleep(0.05)
        assert not lives(server)
    finally:
        process.kill()
        if server and lives(server):
            os.kill(server, signal.SIGKILL)
