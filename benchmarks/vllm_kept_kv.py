"""What a long prefix costs after a sleep: vLLM with its KV cache kept, without, and in vLLM's own sleep mode.

    python benchmarks/vllm_kept_kv.py --out vllm_kept_kv.json

In each round the prefix is computed once, and asked for again while it is cached; then the model sleeps and wakes at
level 1, and is asked once more, in turns with the cache kept and not. Each answer's tokens are compared with those of
the first time. At the end it wakes by tags, and then once more with the weights changed in between: after that nothing
may be found. Needs vLLM; the 32B model with 40,000 tokens takes 76 GiB of the GPU and 72 GiB of host memory. `--shape
windows` has two kinds of layers, each with a KV cache of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from checkpoints import SHAPES, write_config
from model_server import exit_on_sigterm
from record import GIB, machine_apart, touch_host_memory

BLOCK = 16  # tokens, as vLLM takes by default
MIB = 1 << 20


def kv_bytes(shape: str, tokens: int, dtype: str) -> int:
    """What a prefix takes in all layers."""
    size, of_model = 1 if dtype.startswith("fp8") else 2, SHAPES[shape]
    return 2 * of_model.layers * of_model.kv_heads * 128 * size * tokens


def link_s(nbytes: int) -> dict[str, float]:
    """What so many bytes take on the link by the copy engine, in copies of 256 MiB."""
    import torch

    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    seconds = {}
    for name, into, source in (("to_host", host, device), ("to_device", device, host)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            into.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds[name] = min(times) * nbytes / host.nbytes
    del host, device
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return seconds


def one(shape: str, tokens: int, rounds: int, dtype: str, ranks: dict[str, int], deadline: float) -> None:
    """One engine's rounds, as many as end by the deadline; `CUMEM_SLEEP_DISABLE` leaves vLLM's own sleep mode.

    Prints a line of all that is known after each of them: what fails or hangs later loses nothing of that.
    """
    begun, longest_s = time.perf_counter(), 0.0
    is_ours = not os.environ.get("CUMEM_SLEEP_DISABLE")
    kept = kv_bytes(shape, tokens, dtype)
    os.environ["CUMEM_SLEEP_KEEP_KV_BYTES"] = str(kept if is_ours else 0)
    link = link_s(kept) if not ranks else {}
    import vllm

    folder = Path(tempfile.mkdtemp())
    write_config(folder, SHAPES[shape])
    llm = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        enforce_eager=True,
        kv_cache_memory_bytes=(kept // max(1, ranks.get("tensor_parallel_size", 1))) + GIB,
        kv_cache_dtype=dtype,
        gpu_memory_utilization=0.5,  # of which nothing is made: the cache's size is given
        max_model_len=min(40960, tokens + 64),
        max_num_batched_tokens=4096,
        max_num_seqs=4,
        enable_sleep_mode=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        worker_extension_cls="worker_extension.Extension",
        seed=0,
        **ranks,
    )

    def ask(prompt: list[int], most: int) -> tuple[float, int, list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        (request,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start, request.num_cached_tokens or 0, list(request.outputs[0].token_ids)

    prompt = [(7919 * (place + 3)) % 150000 for place in range(tokens)]
    ask(prompt[::-1][:4096], 16)  # kernels are compiled
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"ours": is_ours, "prefix_bytes": kept, "link_s": link, "rows": rows}
    found["woken_by_tags"] = found["weights_changed"] = None
    for number in range(rounds):
        for keeps in (True, False) if is_ours else (False,):
            round_begun = time.perf_counter()
            if round_begun - begun + longest_s > deadline:
                break
            llm.reset_prefix_cache()
            computed_s, _, first_tokens = ask(prompt, 1)
            _, _, want = ask(prompt, 16)
            warm_s, warm_cached, _ = ask(prompt, 1)
            if is_ours and not keeps:
                llm.collective_rpc("cumem_sleep_keep_kv", args=(False,))
            sleep_s = timed(lambda: llm.sleep(level=1))
            status = llm.collective_rpc("cumem_sleep_status") if is_ours else []
            wake_s = timed(llm.wake_up)
            first_s, cached, first_again = ask(prompt, 1)
            _, _, again = ask(prompt, 16)
            rows.append(
                {
                    "round": number,
                    "keeps": keeps,
                    "computed_s": computed_s,
                    "warm_s": warm_s,
                    "warm_cached_tokens": warm_cached,
                    "sleep_s": sleep_s,
                    "kept_bytes": [sum(tag["kept_bytes"] for tag in each["usage"].values()) for each in status],
                    "wake_s": wake_s,
                    "first_token_s": first_s,
                    "cached_tokens": cached,
                    "same_tokens": again == want and first_again == first_tokens,
                }
            )
            shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in rows[-1].items()}
            print(shown, file=sys.stderr, flush=True)
            print(json.dumps(found), flush=True)
            longest_s = max(longest_s, time.perf_counter() - round_begun)
    for what in ("woken_by_tags", "weights_changed") if is_ours else ():
        llm.reset_prefix_cache()
        ask(prompt, 1)
        llm.sleep(level=1)
        status = llm.collective_rpc("cumem_sleep_status")
        llm.wake_up(tags=["weights"])
        if what == "weights_changed":
            llm.collective_rpc("fill_with_normal_values")
        rest_s = timed(lambda: llm.wake_up(tags=["kv_cache"]))
        cached = ask(prompt, 1)[1]
        found[what] = {
            "kept_bytes": [sum(tag["kept_bytes"] for tag in each["usage"].values()) for each in status],
            "wake_of_kv_cache_s": rest_s,  # with the digests of the weights, if no call has changed them
            "cached_tokens": cached,
        }
        if bool(cached) != (what == "woken_by_tags"):
            found["error"] = f"{what}: {cached} tokens were found"
        print({what: found[what]}, file=sys.stderr, flush=True)
        print(json.dumps(found), flush=True)
    print(json.dumps({**found, "is_whole": True}), flush=True)


def last_line(output: str, *, ours: bool) -> dict[str, Any]:
    """What an engine's process has said last, if it has said anything."""
    whole = [line for line in output.splitlines(keepends=True) if line.endswith("}\n")]
    return dict(json.loads(whole[-1])) if whole else {"ours": ours, "rows": []}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of all rounds but each engine's first, which pins memory."""
    found = []
    for run in runs:
        for keeps in (True, False):
            rows = [row for row in run["rows"] if row["keeps"] is keeps]
            later = rows[1:] or rows
            if not rows:
                continue
            names = ("computed_s", "warm_s", "sleep_s", "wake_s", "first_token_s")
            found.append(
                {
                    "layer": "cumem-sleep" if run["ours"] else "vLLM",
                    "keeps": keeps,
                    "rounds": len(later),
                    **{name: median(row[name] for row in later) for name in names},
                    "first_sleep_s": rows[0]["sleep_s"],
                    "cached_tokens": min(row["cached_tokens"] for row in rows),
                    "same_tokens": all(row["same_tokens"] for row in rows),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add("--shape", default="32B", choices=sorted(SHAPES), help="of the model (default: %(default)s)")
    add("--tokens", type=int, default=40000, help="of the prefix (default: %(default)s)")
    add("--rounds", type=int, default=3, help="with the cache kept and not, in turns (default: %(default)s)")
    add("--own-rounds", type=int, default=1, help="of vLLM's own sleep mode; 0: none (default: %(default)s)")
    add("--kv-dtype", default="auto", help="of the KV cache (default: the model's)")
    add("--tensor-parallel", type=int, default=1, help="GPUs (default: %(default)s)")
    add("--pipeline-parallel", type=int, default=1, help="GPUs (default: %(default)s)")
    add(
        "--deadline",
        type=float,
        default=240,
        help="seconds for each engine (default: %(default)s)",
    )
    add("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(**json.loads(arguments.one))
        return
    exit_on_sigterm()
    facts = machine_apart("vllm")
    shape = SHAPES[arguments.shape]
    touch_host_memory(shape.weights_bytes + kv_bytes(arguments.shape, arguments.tokens, arguments.kv_dtype) + 4 * GIB)
    parallel = {
        "tensor_parallel_size": arguments.tensor_parallel,
        "pipeline_parallel_size": arguments.pipeline_parallel,
    }
    given = {
        "shape": arguments.shape,
        "tokens": arguments.tokens,
        "dtype": arguments.kv_dtype,
        "ranks": {name: count for name, count in parallel.items() if count > 1},
        "deadline": arguments.deadline,
    }
    runs: list[dict[str, Any]] = []
    for disabled, rounds in ((False, arguments.rounds), (True, arguments.own_rounds)):
        if not rounds:
            continue
        command = [sys.executable, __file__, "--out", "-", "--one", json.dumps({**given, "rounds": rounds})]
        environment = {**os.environ, **({"CUMEM_SLEEP_DISABLE": "1"} if disabled else {})}
        environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # standard output has the result
        # A group of its own: vLLM's processes outlive the one that has started them.
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        output, error, limit_s = "", "it was told to end", arguments.deadline + 60
        try:
            output, _ = process.communicate(timeout=limit_s)
            error = f"it ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"it had not ended after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            runs.append(last_line(output or process.communicate()[0], ours=not disabled))
            if not runs[-1].pop("is_whole", False):
                runs[-1]["error"] = error
            result = {"machine": facts, **given, "summary": summary(runs), "runs": runs}
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
        for what in ("woken_by_tags", "weights_changed"):
            print(f"{what}: {runs[-1].get(what)}; {runs[-1].get('error', 'no error')}", flush=True)
    for row in summary(runs):
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    if any("error" in run for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
