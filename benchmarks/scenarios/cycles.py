"""Sleeps and wakes of engines of several sizes, in one process or more, on one GPU or two."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from .engines import (
    GIB,
    IN_PROCESS,
    allocator,
    batches_repeat,
    checkpoint,
    cycle,
    cycles_keep_tokens,
    engine,
    model_of,
    pytorch_bytes_outside_of_pools,
    tokens,
    used_bytes,
)
from .registry import Facts, check, scenario

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
    """Tag by tag, nothing compiled or captured again."""
    return _five_cycles(folder)


@scenario(other_shape=True, **IN_PROCESS)
def model_8b(folder: Path) -> Facts:
    """Graphs and compile, with Qwen3-8B's shape."""
    return _five_cycles(checkpoint(folder, "8B"), gpu_memory_utilization=0.2)


@scenario(other_shape=True, CUDA_VISIBLE_DEVICES="1", **IN_PROCESS)
def model_32b(folder: Path) -> Facts:
    """The same with Qwen3-32B's shape."""
    return _five_cycles(checkpoint(folder, "32B"), gpu_memory_utilization=0.5)


@scenario(other_shape=True, alone=True)
def tensor_parallel_2(folder: Path) -> Facts:
    """Qwen3-8B's shape over two GPUs, with CUDA graphs."""
    facts: Facts = {}
    llm = engine(checkpoint(folder, "8B"), enforce_eager=False, tensor_parallel_size=2, gpu_memory_utilization=0.15)
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
    cycles_keep_tokens(llm, facts)
    (status,) = llm.collective_rpc("cumem_sleep_status")
    check("the worker's memory is in this layer", status["usage"]["weights"]["bytes"] > GIB)
    check("its operations were counted", status["operations"]["sleep"]["count"] == 3)
    facts["tokens of two batches without a sleep between"] = batches_repeat(llm)
    facts["status"] = status
    return facts


@scenario(VLLM_WORKER_MULTIPROC_METHOD="spawn")
def processes_spawned(folder: Path) -> Facts:
    """The engine in a spawned process."""
    return _in_processes(folder)


@scenario(VLLM_WORKER_MULTIPROC_METHOD="fork")
def processes_forked(folder: Path) -> Facts:
    """The engine in a forked process."""
    return _in_processes(folder)


@scenario(**IN_PROCESS)
def second_engine(folder: Path) -> Facts:
    """Started in the same process, after the first has ended."""
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


@scenario(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", **IN_PROCESS)
def expandable_segments(folder: Path) -> Facts:
    """PyTorch's, for everything outside of the pools."""
    facts: Facts = {}
    llm = engine(folder)
    before = tokens(llm)
    cycle(llm, facts)
    check("tokens", tokens(llm) == before)
    return facts


def _offloading(folder: Path) -> Facts:
    from vllm import SamplingParams

    facts: Facts = {}
    llm = engine(folder, enable_prefix_caching=True, kv_offloading_size=2.0)
    prompt = [(7919 * (place + 5)) % 150000 for place in range(1900)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def ask(when: str) -> list[int]:
        (request,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        facts.setdefault(f"cached tokens {when}", []).append(request.num_cached_tokens)
        return list(request.outputs[0].token_ids)

    before, _ = tokens(llm), ask("at first")
    expected = ask("awake")
    llm.reset_prefix_cache()
    check("what comes back from the host says the same", ask("from the host, awake") == expected)
    for number in range(3):
        cycle(llm, facts, selective=number == 1)  # at once: blocks may still be on their way to the host
        check("the long prompt's tokens", ask("after a sleep") == expected)
        check("tokens", tokens(llm) == before)
    return facts


@scenario(CUMEM_SLEEP_KEEP_KV_BYTES=str(GIB))
def kv_offloading(folder: Path) -> Facts:
    """KV blocks that vLLM offloads to the host: a sleep clears the cache, also where it is to be kept."""
    return _offloading(folder)


@scenario(CUMEM_SLEEP_DISABLE="1")
def kv_offloading_and_vllms_own_sleep_mode(folder: Path) -> Facts:
    """The same without this layer."""
    return _offloading(folder)
