"""What this layer adds, and how it fails: preparing, compression, poison, refusals."""

from __future__ import annotations

from pathlib import Path

from .engines import GIB, IN_PROCESS, KV_CACHE_BYTES, allocator, cycle, cycles_keep_tokens, engine, model_of, tokens
from .registry import Facts, check, scenario


@scenario(CUMEM_SLEEP_POISON="1", **IN_PROCESS)
def poison(folder: Path) -> Facts:
    """Weights that were not loaded again are NaN."""
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
    """Backups are made in the background, after the warm-up."""
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
    """Backups are a third smaller."""
    return _compressed(folder)


@scenario(CUMEM_SLEEP_COMPRESS="auto", CUMEM_SLEEP_PREPARE="1", **IN_PROCESS)
def compressed_and_prepared(folder: Path) -> Facts:
    """The same, made in the background."""
    return _compressed(folder)


@scenario(CUMEM_SLEEP_COMPRESS="auto", **IN_PROCESS)
def compressed_fp8_weights(folder: Path) -> Facts:
    """Quantised while they are loaded."""
    facts: Facts = {}
    llm = engine(folder, quantization="fp8")
    cycles_keep_tokens(llm, facts, levels=(1, 1))
    weights = allocator().usage()["weights"]
    facts["host bytes per byte"] = round(weights.host_bytes / weights.backed_up_bytes, 4)
    check("backups are smaller", facts["host bytes per byte"] < 0.95)
    return facts


@scenario(**IN_PROCESS)
def backend_by_name(folder: Path) -> Facts:
    """The sleep-mode backend `cumem_sleep`."""
    facts: Facts = {}
    llm = engine(folder)
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = "cumem_sleep"
    cycles_keep_tokens(llm, facts, levels=(1, 2))
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    facts["backend"] = type(worker._sleep_mode_backend).__name__
    check("it was this layer's", facts["backend"] == "CumemSleepBackend")
    return facts


@scenario(CUMEM_SLEEP_DISABLE="1", **IN_PROCESS)
def disabled(folder: Path) -> Facts:
    """The layer of vLLM itself."""
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
    """The weights stay; `wake_up` brings the cache back."""
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
    """Too little host memory: an error, and all goes on."""
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
    """Too little GPU memory: an error, and the retry works."""
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
