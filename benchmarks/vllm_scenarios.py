"""What vLLM does with sleep mode, done by a real vLLM on a GPU whose memory is in this layer: is the outcome right?

    python benchmarks/vllm_scenarios.py --out result.json            # all, several beside each other on one GPU
    python benchmarks/vllm_scenarios.py --out result.json --only model_8b,model_32b,tensor_parallel_2    # two GPUs

Every scenario is a process of its own with a small model (Qwen3-0.6B's shape, random weights on disk). It compares
greedy tokens before and after, and whatever else it is about, and fails if one thing is not as it should be. A result
file that is there already keeps its other scenarios.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

GIB = 1 << 30
KV_CACHE_BYTES = 4 * GIB
PROMPTS = [[(7919 * (i + 1) * (j + 3)) % 150000 for j in range(24 + 5 * i)] for i in range(8)]
TAGS = ("weights", "kv_cache")
LIMIT_S = 360

Facts = dict[str, Any]
SCENARIOS: dict[str, tuple[Callable[[Path], Facts], dict[str, str]]] = {}
ALONE: set[str] = set()  # those that take the whole GPU
OTHER_SHAPES: set[str] = set()  # larger models, left out unless named


def scenario(
    *, alone: bool = False, other_shape: bool = False, **environment: str
) -> Callable[[Callable[[Path], Facts]], Callable[[Path], Facts]]:
    """Registers a function under its name, to be run with these environment variables."""

    def register(function: Callable[[Path], Facts]) -> Callable[[Path], Facts]:
        SCENARIOS[function.__name__] = (function, environment)
        if alone:
            ALONE.add(function.__name__)
        if other_shape:
            OTHER_SHAPES.add(function.__name__)
        return function

    return register


def check(what: str, holds: object) -> None:
    if not holds:
        raise AssertionError(what)


def engine(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    defaults = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.05,  # several share the GPU
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "enable_sleep_mode": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    return LLM(model=str(folder), **{**defaults, **options})


def tokens(llm: Any, **options: Any) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    found = []
    for prompt in PROMPTS:  # one by one: which requests share a batch changes the rounding, and so some tokens
        (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False, **options)
        found.append(list(output.outputs[0].token_ids))
    check("the model says different things to different prompts", len({tuple(t) for t in found}) == len(found))
    return found


def batches_repeat(llm: Any) -> dict[str, int]:
    """How many greedy tokens are the same if all prompts go in at once, twice, with no sleep between."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    runs = []
    for _ in range(2):
        llm.reset_prefix_cache()
        runs.append([t for o in llm.generate(requests, greedy, use_tqdm=False) for t in o.outputs[0].token_ids])
    return {"same": sum(a == b for a, b in zip(*runs, strict=True)), "of": len(runs[0])}


def allocator() -> Any:
    """The layer's allocator, where the engine is in this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    import cumem_sleep

    check("vLLM's memory comes from this layer", CuMemAllocator is cumem_sleep.CuMemAllocator)
    return CuMemAllocator.get_instance()


def model_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def used_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def pytorch_bytes_outside_of_pools() -> int:
    import torch

    return int(torch.cuda.memory_reserved()) - allocator().get_current_usage()


@contextmanager
def timed(facts: Facts, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    facts.setdefault(name, []).append(round(time.perf_counter() - start, 4))


def cycle(llm: Any, facts: Facts, *, level: int = 1, selective: bool = False) -> None:
    with timed(facts, f"sleep level {level} s"):
        llm.sleep(level=level)
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" and os.environ.get("CUMEM_SLEEP_DISABLE") != "1":
        usages = allocator().usage().values()
        check("all memory sleeps, in this layer", usages and all(u.asleep_segments == u.segments for u in usages))
    if level == 2:
        llm.wake_up(tags=["weights"])
        with timed(facts, "reload_weights s"):
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    elif selective:
        for tag in TAGS:
            llm.wake_up(tags=[tag])
    else:
        with timed(facts, "wake s"):
            llm.wake_up()


IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


CYCLES: dict[str, dict[str, Any]] = {
    "level 1": {},
    "level 1, woken a tag at a time": {"selective": True},
    "level 2 with reload": {"level": 2},
}


def _five_cycles(folder: Path, **options: Any) -> Facts:
    """Each kind of cycle five times, in turn."""
    facts: Facts = {}
    llm = engine(folder, enforce_eager=False, **options)
    from vllm.compilation.counter import compilation_counter

    before = tokens(llm)
    counts = vars(compilation_counter.clone())
    check("graphs were captured and code compiled", counts["num_cudagraph_captured"] and counts["num_graphs_seen"])
    addresses = {name: parameter.data_ptr() for name, parameter in model_of(llm).named_parameters()}
    held: dict[str, list[int]] = {}
    for number in range(5):
        for kind, how in CYCLES.items():
            cycle(llm, facts, **how)
            check(f"tokens after cycle {number + 1}, {kind}", tokens(llm) == before)
            cache = pytorch_bytes_outside_of_pools()
            held.setdefault(kind, []).append(used_bytes() - cache)
            facts.setdefault("bytes that PyTorch keeps outside of the pools, after each cycle", []).append(cache)
    facts["other bytes in use awake, after each cycle"] = held
    for kind, each in held.items():  # the first round makes what stays: graphs' and kernels' own memory
        check(f"{kind}: no cycle leaves memory behind", max(each[1:]) - min(each[1:]) <= 4 << 20)
    check("counters stand still", vars(compilation_counter.clone()) == counts)
    check("addresses stay", addresses == {n: p.data_ptr() for n, p in model_of(llm).named_parameters()})
    llm.sleep(level=1)
    facts["bytes in use asleep"] = used_bytes()
    facts["of these, PyTorch's outside of the pools"] = pytorch_bytes_outside_of_pools()
    facts["of these, mapped segments of the layer"] = sum(t.mapped_bytes for t in allocator().usage().values())
    llm.wake_up()
    facts["counters"] = counts
    facts["usage"] = {tag: vars(usage) for tag, usage in allocator().usage().items()}
    return facts


@scenario(alone=True, **IN_PROCESS)
def graphs_and_compile(folder: Path) -> Facts:
    """Levels 1 and 2 (with reload), tag by tag: same tokens, no memory left, nothing compiled or captured again."""
    return _five_cycles(folder)


@scenario(other_shape=True, **IN_PROCESS)
def model_8b(folder: Path) -> Facts:
    """The same with Qwen3-8B's shape."""
    return _five_cycles(_checkpoint(folder, "8B"), gpu_memory_utilization=0.2)


@scenario(other_shape=True, CUDA_VISIBLE_DEVICES="1", **IN_PROCESS)
def model_32b(folder: Path) -> Facts:
    """The same with Qwen3-32B's shape, on the second GPU: its files want a larger machine."""
    return _five_cycles(_checkpoint(folder, "32B"), gpu_memory_utilization=0.5)


@scenario(other_shape=True, alone=True)
def tensor_parallel_2(folder: Path) -> Facts:
    """Qwen3-8B's shape over two GPUs, with CUDA graphs: level 1, level 2 with reload, the status of both ranks."""
    facts: Facts = {}
    llm = engine(_checkpoint(folder, "8B"), enforce_eager=False, tensor_parallel_size=2, gpu_memory_utilization=0.15)
    before = tokens(llm)
    for number in range(3):
        cycle(llm, facts, selective=number == 2)
        check(f"tokens after cycle {number + 1} at level 1", tokens(llm) == before)
    cycle(llm, facts, level=2)
    check("tokens after level 2", tokens(llm) == before)
    statuses = llm.collective_rpc("cumem_sleep_status")
    check("two ranks on two devices", [(s["rank"], len(s["devices"])) for s in statuses] == [(0, 1), (1, 1)])
    facts["statuses"] = statuses
    return facts


def _in_processes(folder: Path) -> Facts:
    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    for _ in range(2):
        cycle(llm, facts)
        check("tokens after level 1", tokens(llm) == before)
    cycle(llm, facts, level=2)
    check("tokens after level 2", tokens(llm) == before)
    (status,) = llm.collective_rpc("cumem_sleep_status")
    check("the worker's memory is in this layer", status["usage"]["weights"]["bytes"] > GIB)
    check("its operations were counted", status["operations"]["sleep"]["count"] == 3)
    facts["tokens of two batches without a sleep between"] = batches_repeat(llm)
    facts["status"] = status
    return facts


@scenario(VLLM_WORKER_MULTIPROC_METHOD="spawn")
def processes_spawned(folder: Path) -> Facts:
    """The engine in a process of its own, spawned."""
    return _in_processes(folder)


@scenario(VLLM_WORKER_MULTIPROC_METHOD="fork")
def processes_forked(folder: Path) -> Facts:
    """The engine in a process of its own, forked."""
    return _in_processes(folder)


@scenario(**IN_PROCESS)
def fp8_weights(folder: Path) -> Facts:
    """Weights quantised while they are loaded; level 2 reloads and quantises again."""
    facts: Facts = {}
    llm = engine(folder, quantization="fp8")
    import torch

    check("weights are fp8", any(p.dtype == torch.float8_e4m3fn for p in model_of(llm).parameters()))
    before = tokens(llm)
    for _ in range(2):
        cycle(llm, facts)
        check("tokens after level 1", tokens(llm) == before)
    cycle(llm, facts, level=2)
    check("tokens after level 2", tokens(llm) == before)
    return facts


@scenario(**IN_PROCESS)
def fp8_kv_cache(folder: Path) -> Facts:
    """The KV cache in fp8, with its scales."""
    facts: Facts = {}
    llm = engine(folder, kv_cache_dtype="fp8")
    before = tokens(llm)
    for level in (1, 1, 2):
        cycle(llm, facts, level=level)
        check(f"tokens after level {level}", tokens(llm) == before)
    return facts


@scenario(**IN_PROCESS)
def lora(folder: Path) -> Facts:
    """An adapter that changes the tokens goes on changing them in the same way."""
    from vllm.lora.request import LoRARequest

    adapter = folder.parent / "adapter"
    _write_adapter(folder, adapter)
    facts: Facts = {}
    llm = engine(folder, enable_lora=True, max_lora_rank=8)
    request = LoRARequest("adapter", 1, str(adapter))
    plain, adapted = tokens(llm), tokens(llm, lora_request=request)
    check("the adapter changes the tokens", plain != adapted)
    llm.reset_prefix_cache()
    facts["tokens without a sleep between repeat"] = tokens(llm, lora_request=request) == adapted
    stacked = _stacked_adapters(llm)
    check("there are adapters", stacked)
    for number in range(2):
        cycle(llm, facts, selective=number == 1)
        check("bytes of the adapters", _stacked_adapters(llm) == stacked)
        check("tokens without the adapter", tokens(llm) == plain)
        again = tokens(llm, lora_request=request)
        check("tokens with it", again == adapted or not facts["tokens without a sleep between repeat"])
        facts["tokens that are the same"] = sum(
            a == b for x, y in zip(again, adapted, strict=True) for a, b in zip(x, y, strict=True)
        )
    return facts


@scenario(**IN_PROCESS)
def draft_model(folder: Path) -> Facts:
    """Speculative decoding with a draft model; its weights sleep as well."""
    facts: Facts = {}
    speculative = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 3}
    llm = engine(folder, speculative_config=speculative)
    before = tokens(llm)
    for number in range(2):
        cycle(llm, facts, selective=number == 1)
        check("tokens after level 1", tokens(llm) == before)
    return facts


@scenario(**IN_PROCESS)
def second_engine(folder: Path) -> Facts:
    """An engine is shut down, and another one started in the same process."""
    facts: Facts = {}
    import torch

    found = []
    for number in range(2):
        llm = engine(folder)
        found.append(tokens(llm))
        cycle(llm, facts)
        check(f"engine {number + 1}: tokens after level 1", tokens(llm) == found[-1])
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        facts.setdefault("bytes left in the layer", []).append(allocator().get_current_usage())
    check("both say the same", found[0] == found[1])
    check("nothing is left in the layer", not any(facts["bytes left in the layer"]))
    return facts


@scenario(**IN_PROCESS)
def weights_updated_while_kv_cache_sleeps(folder: Path) -> Facts:
    """As in reinforcement learning: level 2, weights awake, other weights written, then the KV cache."""
    other = folder.parent / "other"
    facts: Facts = {}
    llm = engine(other)
    wanted = tokens(llm)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    llm = engine(folder)
    check("other weights, other tokens", tokens(llm) != wanted)
    for level in (2, 1):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        check("the KV cache sleeps", allocator().usage()["kv_cache"].asleep_segments)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.wake_up(tags=["kv_cache"])
        check(f"tokens of the new weights, level {level}", tokens(llm) == wanted)
    cycle(llm, facts)
    check("and after a sleep at level 1", tokens(llm) == wanted)
    return facts


@scenario(CUMEM_SLEEP_POISON="1", **IN_PROCESS)
def poison(folder: Path) -> Facts:
    """Weights that were dropped and not loaded again are NaN; loaded again, all is well."""
    import torch

    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    llm.sleep(level=2)
    llm.wake_up()
    nan = [name for name, p in model_of(llm).named_parameters() if torch.isnan(p.float()).all()]
    facts["parameters that are all NaN"] = len(nan)
    check("every parameter is NaN", len(nan) == len(list(model_of(llm).parameters())))
    llm.collective_rpc("reload_weights")
    check("tokens after the weights were loaded", tokens(llm) == before)
    return facts


@scenario(CUMEM_SLEEP_PREPARE="1", **IN_PROCESS)
def prepared(folder: Path) -> Facts:
    """Backups are made after the warm-up, in the background; the first sleep copies what a later one copies."""
    facts: Facts = {}
    llm = engine(folder, enforce_eager=False)
    before = tokens(llm)
    preparation = allocator()._preparation
    check("it was begun by itself", preparation is not None)
    check("it ends well", preparation.wait(60) and preparation.error is None)
    cycle(llm, facts)
    first = allocator().totals()["sleep"].bytes
    check("tokens", tokens(llm) == before)
    cycle(llm, facts)
    later = {what: nbytes - first[what] for what, nbytes in allocator().totals()["sleep"].bytes.items()}
    facts["bytes of the first sleep"], facts["bytes of the next"] = first, later
    check("no more is copied than changes while tokens are made", first["copied"] <= later["copied"])
    check("which is little", later["copied"] < later["clean"] / 20)  # vLLM's sampler keeps state among the weights
    check("tokens", tokens(llm) == before)
    return facts


def _compressed(folder: Path) -> Facts:
    """Cycles at level 1 and 2; backups take 0.72 of the weights' bytes at most."""
    facts: Facts = {}
    llm = engine(folder, enforce_eager=False)
    before = tokens(llm)
    preparation = allocator()._preparation
    if preparation is not None:
        check("preparing ends well", preparation.wait(60) and preparation.error is None)
    for number in range(3):
        cycle(llm, facts, selective=number == 2)
        check(f"tokens after cycle {number + 1} at level 1", tokens(llm) == before)
        weights = allocator().usage()["weights"]
        facts.setdefault("host bytes per byte", []).append(round(weights.host_bytes / weights.backed_up_bytes, 4))
    check("backups are smaller", max(facts["host bytes per byte"]) <= 0.72)
    if preparation is not None:
        first = allocator().totals()["sleep"].bytes
        check("what was prepared was not copied again", first["copied"] < first["clean"] / 5)
    cycle(llm, facts, level=2)
    check("tokens after level 2", tokens(llm) == before)
    cycle(llm, facts)
    check("tokens after level 1 again", tokens(llm) == before)
    return facts


@scenario(CUMEM_SLEEP_COMPRESS="auto", **IN_PROCESS)
def compressed(folder: Path) -> Facts:
    """Backups are compressed: same tokens after levels 1 and 2, backups a third smaller."""
    return _compressed(folder)


@scenario(CUMEM_SLEEP_COMPRESS="auto", CUMEM_SLEEP_PREPARE="1", **IN_PROCESS)
def compressed_and_prepared(folder: Path) -> Facts:
    """The same with backups made after the warm-up, in the background."""
    return _compressed(folder)


@scenario(CUMEM_SLEEP_COMPRESS="auto", **IN_PROCESS)
def compressed_fp8_weights(folder: Path) -> Facts:
    """Weights quantised while they are loaded, backups compressed."""
    facts: Facts = {}
    llm = engine(folder, quantization="fp8")
    before = tokens(llm)
    for _ in range(2):
        cycle(llm, facts)
        check("tokens after level 1", tokens(llm) == before)
    weights = allocator().usage()["weights"]
    facts["host bytes per byte"] = round(weights.host_bytes / weights.backed_up_bytes, 4)
    check("backups are smaller", facts["host bytes per byte"] < 0.95)
    return facts


@scenario(**IN_PROCESS)
def backend_by_name(folder: Path) -> Facts:
    """The sleep-mode backend `cumem_sleep`, chosen by its name."""
    facts: Facts = {}
    llm = engine(folder)
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "cumem_sleep"
    before = tokens(llm)
    for level in (1, 2):
        cycle(llm, facts, level=level)
        check(f"tokens after level {level}", tokens(llm) == before)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    facts["backend"] = type(worker._sleep_mode_backend).__name__
    check("it was this layer's", facts["backend"] == "CumemSleepBackend")
    return facts


@scenario(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", **IN_PROCESS)
def expandable_segments(folder: Path) -> Facts:
    """PyTorch's expandable segments are on for everything outside of the pools."""
    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    cycle(llm, facts)
    check("tokens", tokens(llm) == before)
    return facts


@scenario(CUMEM_SLEEP_DISABLE="1", **IN_PROCESS)
def disabled(folder: Path) -> Facts:
    """The layer that vLLM comes with, as if this one was not there."""
    from vllm import LLM  # noqa: F401  loads vLLM
    from vllm.device_allocator.cumem import CuMemAllocator

    facts: Facts = {"module": CuMemAllocator.__module__}
    llm = engine(folder)
    check("vLLM's own allocator is used", CuMemAllocator.instance is not None)
    check("and it is vLLM's", CuMemAllocator.__module__ == "vllm.device_allocator.cumem")
    before = tokens(llm)
    cycle(llm, facts)
    check("tokens", tokens(llm) == before)
    return facts


@scenario(**IN_PROCESS)
def kv_cache_released_alone(folder: Path) -> Facts:
    """The KV cache is dropped while the weights stay; wake_up brings it back."""
    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    llm.reset_prefix_cache()
    report = allocator().discard(("kv_cache",))
    check("it was all of it", report.freed_bytes >= KV_CACHE_BYTES * 0.98)
    check("the weights are awake", not allocator().usage()["weights"].asleep_segments)
    llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})  # the worker's: vLLM keeps tables in that pool as well
    check("tokens", tokens(llm) == before)
    facts["report"] = str(report)
    return facts


@scenario(CUMEM_SLEEP_HOST_BUDGET_BYTES="64MiB", **IN_PROCESS)
def failed_sleep(folder: Path) -> Facts:
    """Too little host memory for a sleep: an error that says so, and all goes on afterwards."""
    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    try:
        llm.sleep(level=1)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    check("the sleep was refused", "OutOfHostMemory" in facts.get("error", ""))
    check("all is awake", not any(usage.asleep_segments for usage in allocator().usage().values()))
    llm.wake_up()  # vLLM has stopped scheduling before it called the layer
    check("tokens", tokens(llm) == before)
    return facts


@scenario(alone=True, **IN_PROCESS)
def failed_wake(folder: Path) -> Facts:
    """Too little GPU memory for a wake: an error that says so, and the same call works once there is room."""
    import torch

    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    llm.sleep(level=1)
    other = torch.empty(torch.cuda.mem_get_info()[0] - GIB, dtype=torch.uint8, device="cuda")
    try:
        llm.wake_up()
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    check("the wake was refused", "OutOfDeviceMemory" in facts.get("error", ""))
    check("all sleeps", not any(usage.mapped_bytes for usage in allocator().usage().values()))
    del other
    torch.cuda.empty_cache()
    llm.wake_up()
    check("tokens", tokens(llm) == before)
    return facts


class GatedServer:
    """`vllm serve` of the small model behind the gate."""

    def __init__(self, folder: Path, name: str, port: int, *options: str) -> None:
        from model_server import Deadline, Server

        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--skip-tokenizer-init", "--enable-sleep-mode", "--enforce-eager", "--max-model-len", "2048"),
            *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--middleware", "cumem_sleep.vllm.SleepGate", *options),
        ]
        log = folder.parent / f"serve_{name}.log"
        self.port = port
        self.server = Server("model", command, port, {}, log, Deadline(LIMIT_S - 20))

    def __enter__(self) -> GatedServer:
        self.server.start(180)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        print(self.server.log.read_text(errors="replace"))

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        with contextlib.suppress(json.JSONDecodeError):
            content = json.loads(content)
        return response.status, dict(response.getheaders()), content

    def expect(self, status: int, method: str, path: str, body: object = None, token: str = "") -> Any:
        found, _, content = self.ask(method, path, body, token)
        check(f"{method} {path}: {found} {content}", found == status)
        return content

    def tokens(self, prompt: list[int], token: str = "", *, max_tokens: int = 24) -> tuple[int, Any]:
        """Status, and the greedy tokens or the error."""
        request = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, _, content = self.ask("POST", "/v1/completions", {**request, "return_token_ids": True}, token)
        return status, content["choices"][0]["token_ids"] if status == 200 else content

    def wakes(self) -> int:
        (status,) = self.expect(200, "POST", "/collective_rpc", {"method": "cumem_sleep_status"})["results"]
        return int(status["operations"].get("wake", {"count": 0})["count"])


DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}


@scenario(CUMEM_SLEEP_ON_REQUEST="reject", **DEV_MODE)
def gate_rejects(folder: Path) -> Facts:
    """`vllm serve` with the gate: 503 while asleep, /wake and /reload_weights, metrics, level 2 without a reload."""
    facts: Facts = {}
    with GatedServer(folder, "reject", 8101) as server:
        _, before = server.tokens(PROMPTS[0])
        server.expect(200, "POST", "/sleep?level=1")
        status, headers, content = server.ask("POST", "/v1/completions", {"model": "model", "prompt": PROMPTS[0]})
        facts["asleep"] = [status, headers.get("retry-after"), content]
        check("503 with Retry-After and an error in OpenAI's shape", status == 503 and headers["retry-after"])
        facts["health asleep"] = server.expect(503, "GET", "/health")
        server.expect(200, "POST", "/sleep?level=1")
        server.expect(409, "POST", "/reload_weights")
        server.expect(409, "POST", "/resume")
        server.expect(200, "POST", "/wake?tags=weights")
        check("half awake it does not answer", server.tokens(PROMPTS[0])[0] == 503)
        server.expect(200, "POST", "/wake")
        server.expect(200, "GET", "/health")
        check("tokens", server.tokens(PROMPTS[0]) == (200, before))
        server.expect(200, "POST", "/sleep?level=2")
        server.expect(200, "POST", "/wake_up")
        status, content = server.tokens(PROMPTS[0])
        facts["after level 2 without a reload"] = [status, content]
        check("no garbage is served", status == 503)
        server.expect(200, "POST", "/reload_weights")
        check("tokens after the reload", server.tokens(PROMPTS[0]) == (200, before))
        metrics = server.expect(200, "GET", "/metrics").splitlines()
        facts["metrics"] = [line for line in metrics if line.startswith("cumem_sleep:")]
        check("metrics", any("operations_total" in line for line in facts["metrics"]))
    return facts


@scenario(CUMEM_SLEEP_ON_REQUEST="wake", **DEV_MODE)
def gate_wakes(folder: Path) -> Facts:
    """Requests to a sleeping server wake it, once for all of them; at level 2 the weights are loaded as well."""
    facts: Facts = {}
    with GatedServer(folder, "wake", 8102) as server:
        before = [server.tokens(prompt)[1] for prompt in PROMPTS[:4]]
        for level in (0, 1, 2):
            server.expect(200, "POST", "/reset_prefix_cache")
            server.expect(200, "POST", f"/sleep?level={level}")
            facts[f"health at level {level}"] = server.expect(200, "GET", "/health")
            wakes = server.wakes()
            with timed(facts, f"answer at level {level} s"):
                check(f"tokens of the first at level {level}", server.tokens(PROMPTS[0]) == (200, before[0]))
            server.expect(200, "POST", f"/sleep?level={level}")
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda prompt: server.tokens(prompt)[0], PROMPTS[:4]))
            check(f"four at once are answered at level {level}: {answers}", answers == [200] * 4)
            facts[f"wakes of the layer at level {level}"] = server.wakes() - wakes
            check("one wake each", server.wakes() - wakes == (0, 2, 4)[level])  # at level 2 one for each tag
            # What four at once left in the prefix cache is rounded differently.
            server.expect(200, "POST", "/reset_prefix_cache")
            check(f"tokens at level {level}", [server.tokens(prompt)[1] for prompt in PROMPTS[:4]] == before)
    return facts


@scenario(CUMEM_SLEEP_ON_REQUEST="wait", CUMEM_SLEEP_REQUEST_DEADLINE_S="4", **DEV_MODE)
def gate_waits(folder: Path) -> Facts:
    """Requests to a sleeping server are held until somebody wakes it, or until their deadline; running ones abort."""
    facts: Facts = {}
    with GatedServer(folder, "wait", 8103) as server, ThreadPoolExecutor(2) as pool:
        _, before = server.tokens(PROMPTS[0])
        server.expect(200, "POST", "/sleep?level=1")
        held = pool.submit(server.tokens, PROMPTS[0])
        time.sleep(1)
        check("it is held", not held.done())
        server.expect(200, "POST", "/wake_up")
        check("tokens of the request that was held", held.result() == (200, before))
        server.expect(200, "POST", "/sleep?level=1")
        with timed(facts, "until the deadline s"):
            facts["at the deadline"] = server.tokens(PROMPTS[0])
        check("503 at the deadline", facts["at the deadline"][0] == 503)
        server.expect(200, "POST", "/wake_up")
        for mode in ("abort", "wait"):
            running = pool.submit(server.tokens, PROMPTS[1], max_tokens=400)
            time.sleep(1)
            with timed(facts, f"sleep beside a running request, mode {mode}, s"):
                server.expect(200, "POST", f"/sleep?level=1&mode={mode}")
            status, answer = running.result()
            facts[f"the running request, mode {mode}"] = [status, len(answer) if status == 200 else answer]
            check("it ended", status == 200)
            check(f"mode {mode}: {len(answer)} of 400 tokens", (len(answer) == 400) == (mode == "wait"))
            server.expect(200, "POST", "/wake_up")
            check(f"tokens after mode {mode}", server.tokens(PROMPTS[0]) == (200, before))
    return facts


@scenario(CUMEM_SLEEP_ADMIN_TOKEN="sesame", CUMEM_SLEEP_ON_REQUEST="wake", **DEV_MODE)
def gate_guards(folder: Path) -> Facts:
    """Sleep and wake want the admin token; a request without the API key does not wake the model."""
    facts: Facts = {}
    with GatedServer(folder, "guard", 8104, "--api-key", "key") as server:
        _, before = server.tokens(PROMPTS[0], "key")
        for path in ("/sleep", "/wake_up", "/wake", "/reload_weights", "/collective_rpc"):
            server.expect(401, "POST", path)
            server.expect(401, "POST", path, token="key")
        server.expect(200, "POST", "/sleep", token="sesame")
        check("401 without the API key", server.tokens(PROMPTS[0])[0] == 401)
        facts["asleep still"] = server.expect(200, "GET", "/is_sleeping")
        check("and it sleeps on", facts["asleep still"] == {"is_sleeping": True})
        check("tokens", server.tokens(PROMPTS[0], "key") == (200, before))
    return facts


def _checkpoint(model: Path, shape: str) -> Path:
    from checkpoints import SHAPES, is_written, write_checkpoint

    folder = model.parent / shape
    with (model.parent / f"{shape}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two scenarios may want the same one
        if not is_written(folder, SHAPES[shape], seed=1):
            write_checkpoint(folder, SHAPES[shape], seed=1)
    return folder


def _stacked_adapters(llm: Any) -> dict[str, int]:
    """A checksum of every tensor that holds adapters."""
    import torch

    sums = {}
    for name, module in model_of(llm).named_modules():
        for attribute in ("lora_a_stacked", "lora_b_stacked"):
            for number, tensor in enumerate(getattr(module, attribute, ())):
                sums[f"{name}.{attribute}.{number}"] = int(tensor.contiguous().view(torch.int16).long().sum())
    return sums


def _write_adapter(folder: Path, adapter: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", heads * 128), ("v_proj", kv_heads * 128)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(8, hidden, generator=generator, dtype=torch.bfloat16) * 0.05
            weights[f"{path}.lora_B.weight"] = torch.randn(size, 8, generator=generator, dtype=torch.bfloat16) * 0.05
    adapter.mkdir(exist_ok=True)
    save_file(weights, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(described))


def run_one(name: str, result: Path, folder: Path) -> None:
    start = time.perf_counter()
    try:
        facts = SCENARIOS[name][0](folder)
        outcome = {"passed": True, **facts}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    outcome["seconds"] = round(time.perf_counter() - start, 1)
    result.write_text(json.dumps(outcome, default=str))
    sys.stdout.flush()
    os._exit(0 if outcome["passed"] else 1)  # engines of other processes end with their pipes


def descendants(root: int) -> list[int]:
    """Every process that this one started, that those started, and so on, whatever sessions they made."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found[1:]


def end(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def run_in_process(name: str, work: Path, logs: Path) -> dict[str, Any]:
    result, log = work / f"{name}.json", logs / f"{name}.log"
    result.unlink(missing_ok=True)
    environment = {**os.environ, **SCENARIOS[name][1], "VLLM_CACHE_ROOT": str(work / "cache")}
    command = [sys.executable, __file__, "--run", name, "--out", str(result), "--work", str(work)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            end([*descendants(process.pid), process.pid])
            process.wait()
    outcome = json.loads(result.read_text()) if result.exists() else {"passed": False, "error": "no result in time"}
    lines = log.read_text(errors="replace").splitlines()
    outcome["says"] = SCENARIOS[name][0].__doc__
    outcome["environment"] = SCENARIOS[name][1]
    outcome["log of the layer"] = [line.split("] ", 1)[-1] for line in lines if "cumem-sleep" in line][:8]
    if not outcome["passed"]:
        outcome["errors"] = [line for line in lines if "ERROR" in line][:20]
        outcome["last lines"] = lines[-25:]
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    usual = [name for name in SCENARIOS if name not in OTHER_SHAPES]
    parser.add_argument("--only", default=",".join(usual), help=f"of {', '.join(SCENARIOS)}; separated by commas")
    parser.add_argument("--jobs", type=int, default=5, help="processes at a time")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-scenarios"), help="folder for checkpoints")
    parser.add_argument("--run", choices=SCENARIOS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.work / "model"
    if arguments.run:
        run_one(arguments.run, arguments.out, model)
    from checkpoints import SHAPES, write_checkpoint
    from model_server import exit_on_sigterm
    from record import machine

    names = arguments.only.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: no such scenario; there are {', '.join(SCENARIOS)}")
    for seed, name in enumerate(("model", "other"), start=1):
        write_checkpoint(arguments.work / name, SHAPES["0.6B"], seed)
    logs = arguments.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"scenarios": {}}
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    facts = {"vllm": version("vllm"), **machine()}
    outcomes: dict[str, Any] = {}
    exit_on_sigterm()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            together = [name for name in names if name not in ALONE]
            futures = {name: pool.submit(run_in_process, name, arguments.work, logs) for name in together}
            for name in [*together, *ALONE.intersection(names)]:
                outcomes[name] = (
                    futures[name].result() if name in futures else run_in_process(name, arguments.work, logs)
                )
                found["scenarios"][name] = {**outcomes[name], "machine": facts}
                arguments.out.write_text(json.dumps(found, indent=2) + "\n")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            end(descendants(os.getpid()))
    for name, outcome in outcomes.items():
        print(f"{'passed' if outcome['passed'] else 'FAILED':8}{name:40}{outcome.get('seconds', 0):6.1f} s")
        if not outcome["passed"]:
            print(f"        {outcome['error']}")
    sys.exit(not all(outcome["passed"] for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
