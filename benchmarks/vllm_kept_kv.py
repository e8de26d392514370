"""What a long prefix costs after a sleep: vLLM with its KV cache kept, without, and in vLLM's own sleep mode.

    python benchmarks/vllm_kept_kv.py --out vllm_kept_kv.json

In each round the prefix is computed once, and asked for again while it is cached; then the model sleeps and wakes at
level 1, and is asked once more, in turns with the cache kept and not. Each answer's tokens and their log probabilities
are compared with those before the first sleep; as a control, the blocks are put in each other's places, after which
they must differ. At the end the model wakes by tags, and once more with other weights written in between: after that
nothing may be found. Needs vLLM; the 32B model with 40,000
tokens takes 76 GiB of the GPU and 72 GiB of host memory. `--shape windows` has two kinds of layers, each with a KV
cache of its own.
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
from model_server import exit_on_sigterm, gpu_memory_in_use_bytes, host_memory_in_use_bytes
from record import GIB, machine_apart, touch_host_memory

MIB = 1 << 20
KEEPING = "cumem-sleep"
MOST_DIFFERENCE = 1e-3  # of log probabilities


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


class Measured:
    """An engine with a prefix, and what it answered before its first sleep."""

    def __init__(self, llm: Any, tokens: int) -> None:
        self.llm = llm
        self.prompt = [(7919 * (place + 3)) % 150000 for place in range(tokens)]
        llm.collective_rpc("fill_with_telling_values", args=(0,))
        llm.reset_prefix_cache()
        self.ask(self.prompt[::-1][:4096])  # kernels are compiled
        self.first_token_s()
        self.expected = self.ask(self.prompt)

    def ask(self, prompt: list[int], most: int = 16) -> tuple[list[int], list[float], int]:
        """Tokens, their log probabilities, and how many tokens of the prompt were in the cache."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, logprobs=0)
        (request,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = request.outputs[0]
        tokens = list(answer.token_ids)
        log_probabilities = [of[token].logprob for of, token in zip(answer.logprobs, tokens, strict=True)]
        return tokens, log_probabilities, request.num_cached_tokens or 0

    def first_token_s(self) -> tuple[float, int]:
        """The seconds to the prompt's first token, and how many of its tokens were in the cache."""
        start = time.perf_counter()
        cached = self.ask(self.prompt, 1)[2]
        return time.perf_counter() - start, cached

    def answer(self) -> dict[str, Any]:
        """Whether the prompt, which is in the cache by now, is answered as before."""
        tokens, log_probabilities, _ = self.ask(self.prompt)
        pairs = zip(log_probabilities, self.expected[1], strict=True)
        return {
            "same_tokens": tokens == self.expected[0],
            "log_probabilities_differ_by": max(abs(now - before) for now, before in pairs),
        }

    def cycle(self, *, keeps: bool | None) -> dict[str, Any]:
        """Computed once, asked for again; then a sleep and a wake, and asked for once more. `None`: nothing is said."""
        self.llm.reset_prefix_cache()
        computed_s, _ = self.first_token_s()
        warm_s, warm_cached = self.first_token_s()
        if keeps is False:
            self.llm.collective_rpc("cumem_sleep_keep_kv", args=(False,))
        gpu_bytes, host_bytes = gpu_memory_in_use_bytes(), host_memory_in_use_bytes()
        sleep_s = timed(lambda: self.llm.sleep(level=1))
        row = {
            "keeps": bool(keeps),
            "computed_s": computed_s,
            "warm_s": warm_s,
            "warm_cached_tokens": warm_cached,
            "sleep_s": sleep_s,
            "kept_bytes": self.kept_bytes() if keeps is not None else [],
            "gpu_bytes_awake": gpu_bytes,
            "host_bytes_awake": host_bytes,
            "wake_s": timed(self.llm.wake_up),
        }
        row["first_token_s"], row["cached_tokens"] = self.first_token_s()
        return {**row, **self.answer()}

    def kept_bytes(self) -> list[int]:
        """Of each rank."""
        status = self.llm.collective_rpc("cumem_sleep_status")
        return [sum(tag["kept_bytes"] for tag in each["usage"].values()) for each in status]

    def wake_by_tags(self, between: Callable[[], object]) -> dict[str, Any]:
        """What is found after a wake in two calls, between which something happens."""
        self.llm.reset_prefix_cache()
        self.first_token_s()
        self.llm.sleep(level=1)
        kept = self.kept_bytes()
        self.llm.wake_up(tags=["weights"])
        between()
        # With the digests of the weights, if no call has changed them.
        wake_s = timed(lambda: self.llm.wake_up(tags=["kv_cache"]))
        return {"kept_bytes": kept, "wake_of_kv_cache_s": wake_s, "cached_tokens": self.first_token_s()[1]}

    def control(self) -> dict[str, Any]:
        """The same prompt, found in a cache whose blocks lie in each other's places."""
        self.llm.reset_prefix_cache()
        self.first_token_s()
        layers = self.llm.collective_rpc("exchange_kv_blocks")
        _, cached = self.first_token_s()
        return {"layers": layers, "cached_tokens": cached, **self.answer()}


def is_same(row: dict[str, Any]) -> bool:
    return bool(row["same_tokens"] and row["log_probabilities_differ_by"] < MOST_DIFFERENCE)


def engine(shape: str, tokens: int, dtype: str, ranks: dict[str, int]) -> Any:
    import vllm

    folder = Path(tempfile.mkdtemp())
    write_config(folder, SHAPES[shape])
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",
        enforce_eager=True,
        kv_cache_memory_bytes=kv_bytes(shape, tokens, dtype) // max(1, ranks.get("tensor_parallel_size", 1)) + GIB,
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


def one(way: str, shape: str, tokens: int, rounds: int, dtype: str, ranks: dict[str, int], deadline: float) -> None:
    """One engine's rounds, as many as end by the deadline, and what is shown only once.

    Prints a line of all that is known after each of them: what fails or hangs later loses nothing of that.
    """
    begun, longest_s = time.perf_counter(), 0.0
    nbytes = kv_bytes(shape, tokens, dtype)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"way": way, "prefix_bytes": nbytes, "link_s": {} if ranks else link_s(nbytes)}
    found["rows"] = rows

    def check(name: str, facts: dict[str, Any], *, is_right: bool) -> None:
        if not is_right:
            found.setdefault("errors", []).append(name)
        print(name, facts, file=sys.stderr, flush=True)
        print(json.dumps(found), flush=True)

    def show_once(name: str, facts: dict[str, Any], *, is_right: bool) -> None:
        found[name] = facts
        check(name, facts, is_right=is_right)

    measured = Measured(engine(shape, tokens, dtype, ranks), tokens)
    for number in range(rounds):
        for keeps in (True, False) if way == KEEPING else (None,):
            round_begun = time.perf_counter()
            if round_begun - begun + longest_s > deadline:
                break
            row = {"round": number, **measured.cycle(keeps=keeps)}
            rows.append(row)
            longest_s = max(longest_s, time.perf_counter() - round_begun)
            is_right = is_same(row) and (row["cached_tokens"] > 0) == bool(keeps)
            check(f"round {number}, keeps={keeps}", row, is_right=is_right)
    control = measured.control()
    show_once("control", control, is_right=control["cached_tokens"] > 0 and not is_same(control))
    if way == KEEPING:
        llm, other_values = measured.llm, "fill_with_telling_values"
        by_tags = measured.wake_by_tags(lambda: None)
        show_once("woken_by_tags", by_tags, is_right=by_tags["cached_tokens"] > 0)
        changed = measured.wake_by_tags(lambda: llm.collective_rpc(other_values, args=(2,)))
        show_once("weights_changed", changed, is_right=changed["cached_tokens"] == 0)
    print(json.dumps({**found, "is_whole": True}), flush=True)


def last_line(output: str, way: str) -> dict[str, Any]:
    """What an engine's process has said last, if it has said anything."""
    whole = [line for line in output.splitlines(keepends=True) if line.endswith("}\n")]
    return dict(json.loads(whole[-1])) if whole else {"way": way, "rows": []}


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
                    "way": run["way"],
                    "keeps": keeps,
                    "rounds": len(later),
                    **{name: median(row[name] for row in later) for name in names},
                    "first_sleep_s": rows[0]["sleep_s"],
                    "cached_tokens": min(row["cached_tokens"] for row in rows),
                    "same_tokens": all(is_same(row) for row in rows),
                    **{f"{name}_grew_by": grown(later, name) for name in ("gpu_bytes_awake", "host_bytes_awake")},
                }
            )
    return found


def grown(rows: list[dict[str, Any]], name: str) -> int | None:
    """From the first to the last."""
    first, last = rows[0][name], rows[-1][name]
    return None if first is None or last is None else last - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add("--shape", default="32B", choices=sorted(SHAPES), help="of the model (default: %(default)s)")
    add("--tokens", type=int, default=40000, help="of the prefix (default: %(default)s)")
    add("--rounds", type=int, default=3, help="with the cache kept and not, in turns (default: %(default)s)")
    add("--off-rounds", type=int, default=0, help="without the setting (default: %(default)s)")
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
    nbytes = kv_bytes(arguments.shape, arguments.tokens, arguments.kv_dtype)
    touch_host_memory(shape.weights_bytes + nbytes + 4 * GIB)
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
    ways = {
        KEEPING: (arguments.rounds, {"CUMEM_SLEEP_KEEP_KV_BYTES": str(nbytes)}),
        "cumem-sleep, not set": (arguments.off_rounds, {}),
        "vLLM": (arguments.own_rounds, {"CUMEM_SLEEP_DISABLE": "1"}),
    }
    for way, (rounds, setting) in ways.items():
        if not rounds:
            continue
        command = [sys.executable, __file__, "--out", "-"]
        command += ["--one", json.dumps({**given, "way": way, "rounds": rounds})]
        environment = {**os.environ, **setting}
        environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # standard output has the result
        # A group of its own: vLLM's processes outlive the one that has started them.
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        output, error, limit_s = "", "it was told to end", arguments.deadline + 90
        try:
            output, _ = process.communicate(timeout=limit_s)
            error = f"it ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"it had not ended after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            runs.append(last_line(output or process.communicate()[0], way))
            if not runs[-1].pop("is_whole", False):
                runs[-1].setdefault("errors", []).append(error)
            result = {"machine": facts, **given, "summary": summary(runs), "runs": runs}
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
        for what in ("control", "woken_by_tags", "weights_changed", "errors"):
            print(f"{way}: {what}: {runs[-1].get(what)}", flush=True)
    for row in summary(runs):
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    if any("errors" in run for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
