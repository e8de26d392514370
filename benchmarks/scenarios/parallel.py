"""One engine over two GPUs, cut in every way that vLLM cuts one; and two engines side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .engines import PROMPTS, checkpoint, cycle, engine, tokens
from .gate import DEV_MODE, GatedServer
from .registry import Facts, check, scenario, timed

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


def check_weights(llm: Any, before: list[dict[str, int]], level: int) -> None:
    after = llm.collective_rpc("sums_of_parameters")
    differ = [name for a, b in zip(before, after, strict=True) for name in a if a[name] != b[name]]
    check(f"weights after level {level}: {differ[:8]} of {len(differ)} differ", not differ)


def cycles_of_ranks(llm: Any, facts: Facts, *, is_alone: bool = False) -> None:
    """Sleeps and wakes at both levels: the same tokens, and what each rank leaves on its GPU and waits for the others.

    Args:
        is_alone: nobody else is on these GPUs, so what is left on them is this engine's.
    """
    first = tokens(llm)
    llm.reset_prefix_cache()
    check("tokens repeat without a sleep", tokens(llm) == first)
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
            if is_alone:
                left.extend(status["device_used_bytes"] for status in asleep)  # noqa: B023

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
        check(f"tokens after level {level}", tokens(llm) == first)
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


CYCLES_AT_LEVEL_3 = 20
# What `checkpoint_ranks.py` found to come back: P2P with cuMem, suspended; nothing in shared host memory of cuMem.
CHECKPOINTABLE = {"NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@scenario(gpus=2, alone=True, limit_s=270, VLLM_ALLREDUCE_USE_SYMM_MEM="0", **CHECKPOINTABLE)
def level_3_of_ranks(folder: Path) -> Facts:
    """Twenty cycles through level 3 with communicators that vLLM suspends, which the layer does not allow yet."""
    from model_server import gpu_memory_in_use_bytes

    facts: Facts = {}
    llm = engine_of_ranks(
        checkpoint(folder, "8B"),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.15,
        disable_custom_all_reduce=True,
        enable_nccl_comm_suspend=True,
        enforce_eager=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]},
    )
    facts["ranks"] = llm.collective_rpc("let_ranks_checkpoint")
    first = tokens(llm)
    weights = llm.collective_rpc("sums_of_parameters")
    for _ in range(CYCLES_AT_LEVEL_3):
        with timed(facts, "sleep level 1 s"):
            llm.sleep(level=1)
        facts.setdefault("bytes in use at level 1", []).append([gpu_memory_in_use_bytes(gpu) for gpu in range(2)])
        with timed(facts, "to level 3 s"):
            said = llm.collective_rpc("cumem_sleep_deepen")
        check(
            f"both ranks are at level 3: {said}",
            not any(each["why"] for each in said) and all(each["checkpointed"] for each in said),
        )
        facts.setdefault("bytes in use at level 3", []).append([gpu_memory_in_use_bytes(gpu) for gpu in range(2)])
        with timed(facts, "wake s"):
            llm.wake_up()
        with timed(facts, "first tokens s"):
            check("tokens", tokens(llm) == first)
    after = llm.collective_rpc("sums_of_parameters")
    check("the weights are what they were", after == weights)
    return facts


@scenario(gpus=2, **STRICT)
def pipeline_parallel_2(folder: Path) -> Facts:
    """On two GPUs."""
    facts: Facts = {}
    cycles_of_ranks(engine_of_ranks(folder, pipeline_parallel_size=2), facts)
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
