"""One engine over two GPUs, cut in every way that vLLM cuts one; and two engines side by side."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .engines import PROMPTS, checkpoint, cycle, engine, tokens
from .gate import DEV_MODE, GatedServer
from .level_3 import refused_level_3
from .ranks import PROBED, TENSOR_PARALLEL, asleep, fails, gpu_is_full, killed_in_a_wake, process_of
from .ray_cluster import ray_cluster
from .registry import Facts, NotHere, check, scenario, timed

LEVELS = (1, 1, 2, 1)
STRICT = {"CUMEM_SLEEP_POISON": "1"}  # no byte from before level 2 is there by chance
MOST_LEFT_BYTES = 4 << 30  # of a context, NCCL's buffers and kernels; weights and KV cache take more


def statuses(llm: Any) -> list[dict[str, Any]]:
    """What the layer says in each worker."""
    found: list[dict[str, Any]] = llm.collective_rpc("cumem_sleep_status")
    return found


def agreed_ms(before: list[dict[str, Any]], after: list[dict[str, Any]], operation: str) -> list[float]:
    """Milliseconds in which each rank agreed with the others; the least is what it costs, the rest is waiting."""

    def seconds(status: dict[str, Any]) -> float:
        return float(status["operations"].get(operation, {"phases": {}})["phases"].get("agree", 0.0))

    return [round(1000 * (seconds(b) - seconds(a)), 3) for a, b in zip(before, after, strict=True)]


def engine_of_ranks(folder: Path, **options: Any) -> Any:
    """One whose workers say what only they know."""
    return engine(folder, worker_extension_cls="worker_extension.Extension", **options)


def bytes_left(llm: Any, asleep: list[dict[str, Any]], *, is_alone: bool) -> list[int] | None:
    """What each rank has on its GPU; `None` if nobody can tell it from what others have there."""
    of_processes: list[int | None] = llm.collective_rpc("gpu_memory_bytes")
    known = [nbytes for nbytes in of_processes if nbytes is not None]
    if len(known) == len(asleep):
        return known
    return [status["device_used_bytes"] for status in asleep] if is_alone else None


def check_weights(llm: Any, before: list[dict[str, int]], level: int) -> None:
    after = llm.collective_rpc("sums_of_parameters")
    differ = [name for a, b in zip(before, after, strict=True) for name in a if a[name] != b[name]]
    check(f"weights after level {level}: {differ[:8]} of {len(differ)} differ", not differ)


def repeating_tokens(llm: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and which of the prompts get others the second time, with no sleep between."""
    first = tokens(llm)
    llm.reset_prefix_cache()
    return first, [i for i, (a, b) in enumerate(zip(first, tokens(llm), strict=True)) if a != b]


def cycles_of_ranks(llm: Any, facts: Facts, *, is_alone: bool = False, tokens_repeat: bool = True) -> None:
    """Sleeps and wakes at both levels: the same tokens, and what each rank leaves on its GPU and waits for the others.

    Args:
        is_alone: nobody else is on these GPUs, so what is left on them is this engine's.
        tokens_repeat: whether this vLLM gives the same tokens twice without this layer. Otherwise only weights tell.
    """
    first, differ = repeating_tokens(llm)
    if tokens_repeat:
        check(f"tokens repeat without a sleep, those of prompts {differ} do not", not differ)
    known = statuses(llm)
    check("each rank has its own memory in this layer", [s["rank"] for s in known] == [0, 1])
    check("on a device of its own", all(len(s["devices"]) == 1 for s in known))
    weights = llm.collective_rpc("sums_of_parameters")

    for level in LEVELS:
        facts.setdefault("levels", []).append(level)
        asleep: list[dict[str, Any]] = []
        left: list[int] = []

        def look() -> None:
            asleep.extend(statuses(llm))  # noqa: B023  called at once
            left.extend(bytes_left(llm, asleep, is_alone=is_alone) or ())  # noqa: B023

        before = statuses(llm)
        cycle(llm, facts, level=level, asleep=look)
        usages = [usage for status in asleep for usage in status["usage"].values()]
        check(f"all ranks sleep at level {level}", all(u["asleep_segments"] == u["segments"] for u in usages))
        after = statuses(llm)
        if left:
            facts.setdefault("bytes left asleep, by rank", []).append(left)
            check(f"little is left: {left}", max(left) < MOST_LEFT_BYTES)
        facts.setdefault("sleep: agreeing ms, by rank", []).append(agreed_ms(before, asleep, "sleep"))
        facts.setdefault("wake: agreeing ms, by rank", []).append(agreed_ms(asleep, after, "wake"))
        check_weights(llm, weights, level)
        after_it = tokens(llm)
        check(f"tokens after level {level}", after_it == first or not tokens_repeat)
    facts["statuses"] = statuses(llm)


@scenario(gpus=2, alone=True, limit_s=240)
def ranks_agree(folder: Path) -> Facts:
    """Twenty cycles at level 1, timed."""
    facts: Facts = {}
    llm = engine_of_ranks(checkpoint(folder, "8B"), tensor_parallel_size=2, gpu_memory_utilization=0.15)
    cycles_of_ranks(llm, facts, is_alone=True)
    times: Facts = {}
    for _ in range(20):
        before = statuses(llm)
        cycle(llm, times)
        after = statuses(llm)
        for operation in ("sleep", "wake"):
            times.setdefault(f"{operation}: agreeing ms", []).append(min(agreed_ms(before, after, operation)))
    facts["twenty cycles"] = times
    for operation in ("sleep", "wake"):
        each = sorted(times[f"{operation}: agreeing ms"])
        facts[f"{operation}: agreeing ms, median"] = each[len(each) // 2]
    return facts


@scenario(gpus=2, **STRICT)
def pipeline_parallel_2(folder: Path) -> Facts:
    """On two GPUs."""
    facts: Facts = {}
    cycles_of_ranks(engine_of_ranks(folder, pipeline_parallel_size=2), facts)
    return facts


@scenario(gpus=2, limit_s=240, **STRICT)
def expert_parallel_2(folder: Path) -> Facts:
    """A Mixture of Experts, `--enable-expert-parallel`."""
    facts: Facts = {}
    # vLLM 0.26 warns here that the experts "were not loaded from checkpoint": it compares the names of parameters with
    # those of their loader, which leave `routed_experts` out. Checksums and poison show whether they were loaded.
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    cycles_of_ranks(engine_of_ranks(checkpoint(folder, "MoE"), **options), facts)
    return facts


ON_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def needs_ray() -> str:
    """Its version."""
    if importlib.util.find_spec("ray") is None:
        raise NotHere("ray is not installed")
    return version("ray")


def on_ray(folder: Path, *, tokens_repeat: bool = True) -> Facts:
    facts: Facts = {"ray": needs_ray()}
    with ray_cluster(gpus=2):
        # Set when the cluster runs already: only vLLM can bring it to the workers, and only if the plugin tells it to.
        os.environ.update(STRICT)
        llm = engine_of_ranks(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
        for name, value in STRICT.items():
            found = llm.collective_rpc("variable", args=(name,))
            check(f"{name} reached the workers: {found}", found == [value, value])
        cycles_of_ranks(llm, facts, tokens_repeat=tokens_repeat)
        llm.llm_engine.engine_core.shutdown()
    return facts


@scenario(gpus=2, limit_s=240, **ON_RAY)
def tensor_parallel_2_on_ray(folder: Path) -> Facts:
    """`--distributed-executor-backend ray`."""
    return on_ray(folder)


# Ray's compiled graphs look for each worker's GPU in the second variable, and vLLM 0.26 keeps Ray from setting it. So
# no model runs there without it, whether it sleeps or not.
EARLIER_EXECUTOR = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0", "CUDA_VISIBLE_DEVICES": "0,1"}


@scenario(gpus=2, limit_s=240, **EARLIER_EXECUTOR, **ON_RAY)
def tensor_parallel_2_on_ray_compiled(folder: Path) -> Facts:
    """On Ray's compiled graphs, by vLLM's earlier executor."""
    needs_ray()
    with ray_cluster(gpus=2):
        options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "enable_sleep_mode": False}
        llm = engine(folder, **options)
        _, differ = repeating_tokens(llm)
        llm.llm_engine.engine_core.shutdown()
    return {
        "without sleep mode, prompts with other tokens the second time": differ,
        **on_ray(folder, tokens_repeat=not differ),
    }


@scenario(gpus=2, alone=True, limit_s=240, **PROBED, **DEV_MODE, **ON_RAY)
def gate_on_ray(folder: Path) -> Facts:
    """It rejects, wakes, refuses level 3; a full GPU, a killed rank."""
    facts: Facts = {"ray": needs_ray()}
    with (
        ray_cluster(gpus=2),
        GatedServer(folder, "ray", 8141, *TENSOR_PARALLEL, "--distributed-executor-backend", "ray") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        _, before = server.tokens(PROMPTS[0])
        for level in (1, 2):
            server.expect(200, "POST", f"/sleep?level={level}")
            check("all ranks sleep", asleep(server) == [True, True])
            check("a request is rejected", server.tokens(PROMPTS[0])[0] == 503)
            server.expect(200, "POST", "/wake?tags=weights" if level == 2 else "/wake")
            if level == 2:
                server.expect(200, "POST", "/reload_weights")
                server.expect(200, "POST", "/wake")
            check(f"tokens after level {level}", server.tokens(PROMPTS[0]) == (200, before))
        facts["level 3"] = refused_level_3(server)
        with gpu_is_full(1):
            fails(server, facts, "/wake_up", 1, [True, True])
        server.expect(200, "POST", "/wake_up")
        check("tokens after the retry", server.tokens(PROMPTS[0]) == (200, before))
        killed_in_a_wake(server, facts, process_of(server, 1), pool)
    return facts


@scenario(gpus=2, alone=True, limit_s=240, **DEV_MODE)
def data_parallel_2(folder: Path) -> Facts:
    """Both engines behind one port sleep and wake."""
    from model_server import gpu_memory_in_use_bytes

    facts: Facts = {}
    options = ("--data-parallel-size", "2", "--api-server-count", "1")
    with GatedServer(folder, "data_parallel", 8121, *options) as server:

        def answers() -> list[Any]:
            """Each prompt twice, for engines take turns."""
            server.expect(200, "POST", "/reset_prefix_cache")
            return [server.tokens(prompt) for prompt in PROMPTS[:4] for _ in range(2)]

        before = answers()
        check("both engines say the same", before[::2] == before[1::2] and before[0][0] == 200)
        facts["bytes in use awake, by GPU"] = [gpu_memory_in_use_bytes(gpu) for gpu in range(2)]
        for level in (1, 1, 2):
            with timed(facts, f"sleep level {level} s"):
                server.expect(200, "POST", f"/sleep?level={level}")
            check("it says so", server.expect(200, "GET", "/is_sleeping") == {"is_sleeping": True})
            left = [gpu_memory_in_use_bytes(gpu) or 0 for gpu in range(2)]
            facts.setdefault("bytes left asleep, by GPU", []).append(left)
            check(f"both have given their memory back: {left}", max(left) < MOST_LEFT_BYTES)
            with timed(facts, f"wake level {level} s"):
                server.expect(200, "POST", "/wake_up")
                if level == 2:
                    server.expect(200, "POST", "/reload_weights")
            check(f"tokens after level {level}", answers() == before)
    return facts
