"""A vLLM engine with a small model, its tokens, its memory, and a sleep and wake of it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .registry import Facts, check, timed

GIB = 1 << 30
KV_CACHE_BYTES = 4 * GIB
PROMPTS = [[(7919 * (i + 1) * (j + 3)) % 150000 for j in range(24 + 5 * i)] for i in range(8)]
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


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


def cycle(llm: Any, facts: Facts, *, level: int = 1, asleep: Callable[[], None] = lambda: None) -> None:
    """A sleep and a wake; `asleep` is called in between."""
    with timed(facts, f"sleep level {level} s"):
        llm.sleep(level=level)
    asleep()
    if level == 2:
        llm.wake_up(tags=["weights"])
        with timed(facts, "reload_weights s"):
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    else:
        with timed(facts, "wake s"):
            llm.wake_up()


def checkpoint(model: Path, shape: str) -> Path:
    from checkpoints import SHAPES, is_written, write_checkpoint

    folder = model.parent / shape
    with (model.parent / f"{shape}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two scenarios may want the same one
        if not is_written(folder, SHAPES[shape], seed=1):
            write_checkpoint(folder, SHAPES[shape], seed=1)
    return folder
