"""Conversations with two models in turns, through `cumem-sleep serve` on one GPU: first tokens with a kept KV cache.

    python benchmarks/serve_kept_kv.py --out serve_kept_kv.json          # about four minutes on an H100

Two vLLM servers with dummy weights, of Qwen3-8B's shape, each with 90 % of the GPU, so that every turn of one is a
switch from the other. Each conversation grows by as many tokens a turn as `--grow` says. First with
CUMEM_SLEEP_KEEP_KV_BYTES, then without, each with a front and servers of its own, and the same turns: what the client
waited for the first token, the sleep and the wake of that time, what vLLM found in its prefix cache, and the first
token of the same prompt asked again, awake. Turns for which there is no time are left out. It needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, write_config
from layers import SIMULATED
from model_server import Deadline, OutOfTime, completion, exit_on_sigterm
from record import command, machine_apart, touch_host_memory
from serve_models import HEADERS, TOKEN, Endpoint, Failed, free_port, front_of, vllm_command
from vllm_kept_kv import kv_bytes

MODELS = ("a", "b")
TOKENS = 2
START_S = 200.0
Facts = dict[str, Any]


def prompt(model: str, tokens: int) -> list[int]:
    """The first tokens of a model's conversation; its answers play no part, so that both ways ask the same."""
    return [(7919 * (place + 3 + 100_003 * MODELS.index(model))) % 150_000 for place in range(tokens)]


def ask(front: Endpoint, model: str, tokens: int, limit_s: float) -> Facts:
    """Seconds to the first token, and how many of the prompt's were cached; None if the server does not say.

    Raises:
        Failed: an error, or an answer that breaks off.
    """
    asked = {**completion(model, prompt(model, tokens), TOKENS), "stream_options": {"include_usage": True}}
    first_token_s, cached, ended = 0.0, None, False
    begin = time.perf_counter()
    with contextlib.closing(front.connection(limit_s)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked), HEADERS)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise Failed(f"{model}: {response.status} {response.read(500).decode(errors='replace')}")
        for line in response:
            kind, _, content = line.decode().strip().partition(": ")
            if kind != "data":
                continue
            if ended := content == "[DONE]":
                break
            event = json.loads(content)
            if "error" in event:
                raise Failed(f"{model}: {event['error']}")
            is_token = any(choice.get("token_ids") or choice.get("text") for choice in event["choices"])
            if is_token and not first_token_s:
                first_token_s = time.perf_counter() - begin
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not ended or not first_token_s:
        raise Failed(f"{model}: the stream broke")
    return {"first_token_s": first_token_s, "cached_tokens": cached}


def status(front: Endpoint) -> dict[str, Facts]:
    return {model["name"]: model for model in front.call("GET", "/status")["models"]}


def one_turn(front: Endpoint, model: str, other: str, tokens: int, deadline: Deadline) -> Facts:
    answer = ask(front, model, tokens, deadline.limit(120.0))
    models = status(front)
    again = ask(front, model, tokens, deadline.limit(120.0))
    return {
        "model": model,
        "prompt_tokens": tokens,
        **answer,
        "sleep_s": models[other]["last_switch"]["seconds"],
        "wake_s": models[model]["last_switch"]["seconds"],
        "kept_bytes_of_the_other": status(front)[other]["kept_bytes"],
        "awake_first_token_s": again["first_token_s"],
        "awake_cached_tokens": again["cached_tokens"],
    }


def write_models(arguments: argparse.Namespace, keep_bytes: int, port: int, file: Path) -> None:
    write_config(arguments.work / arguments.shape, SHAPES[arguments.shape])
    most = arguments.first + arguments.grow * arguments.turns + 64
    models: Facts = {}
    for name in MODELS:
        words = [*shlex.split(arguments.server_command), "--uds", "{socket}", "--served-model-name", name]
        if not arguments.server_command:
            words = [str(vllm_command(arguments.work)), "serve", str(arguments.work / arguments.shape)]
            words += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--seed", "0"]
            words += ["--max-model-len", str(most), "--enable-prefix-caching", "--enable-prompt-tokens-details"]
            words += ["--gpu-memory-utilization", "0.9", "--max-num-seqs", "16"]
            words += ["--middleware", "cumem_sleep.vllm.SleepGate"]
        environment = {
            "VLLM_CACHE_ROOT": str(arguments.work / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "CUMEM_SLEEP_KEEP_KV_BYTES": str(keep_bytes),
        }
        said = shlex.join(words).replace("'{socket}'", "{socket}")
        models[name] = {"command": said, "idle": "never", "levels": [1], "env": environment, "start_timeout": START_S}
    whole: Facts = {"front": {"port": port, "admin_token": TOKEN}, "logs": str(arguments.out.parent / "logs")}
    if SIMULATED or arguments.server_command:
        whole["host_memory"] = "8GiB"
    file.write_text(json.dumps({**whole, "models": models}, indent=2))


def wait_until_started(front: Endpoint, deadline: Deadline, is_over: Callable[[], bool], log: Path) -> None:
    ends_at = time.monotonic() + deadline.limit(2 * START_S)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            models = status(front)
            if error := next((model["error"] for model in models.values() if model["error"]), ""):
                raise Failed(f"{error}; {[model['last_words'] for model in models.values()]}")
            if all(model["phase"] in ("awake", "asleep") for model in models.values()):
                return
        if is_over() or time.monotonic() > ends_at:
            raise Failed(f"not all models have started: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def one_way(arguments: argparse.Namespace, keep_bytes: int, limit_s: float, rows: list[Facts]) -> Facts:
    """All turns for which there is time, with a front of its own."""
    deadline, begin, port = Deadline(limit_s), time.monotonic(), free_port()
    way = "kept" if keep_bytes else "cleared"
    file, log = arguments.work / f"{way}.yaml", arguments.out.with_name(f"serve_kept_kv_{way}.log")
    write_models(arguments, keep_bytes, port, file)
    front, longest_s = Endpoint(port), 0.0
    with front_of(file, log) as process:
        wait_until_started(front, deadline, lambda: process.poll() is not None, log)
        started_s = time.monotonic() - begin
        for model in MODELS:  # the first requests compile kernels, and pin what is not pinned yet
            ask(front, model, 256, deadline.limit(120.0))
        for turn in range(arguments.turns):
            turn_begins = time.monotonic()
            for model, other in (MODELS, MODELS[::-1]):
                tokens = arguments.first + arguments.grow * turn
                rows.append({"way": way, "turn": turn, **one_turn(front, model, other, tokens, deadline)})
                shown = {
                    name: round(value, 3) if isinstance(value, float) else value for name, value in rows[-1].items()
                }
                print(shown, file=sys.stderr, flush=True)
            longest_s = max(longest_s, time.monotonic() - turn_begins)
            if deadline.left() < 1.5 * longest_s + 10.0:
                break
    return {"started_s": started_s, "seconds": time.monotonic() - begin, "ended_in_order": process.returncode == 0}


def summary(rows: list[Facts]) -> list[Facts]:
    """Medians of both models' later turns: in the first, there is nothing to find."""
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        later = [row for row in rows if row["way"] == way and row["turn"]]
        if later:
            names = ("first_token_s", "sleep_s", "wake_s", "awake_first_token_s", "prompt_tokens")
            medians = {name: statistics.median(row[name] for row in later) for name in names}
            found.append({"way": way, "turns": len(later), **medians})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add("--shape", default="8B", choices=sorted(SHAPES), help="of both models (default: %(default)s)")
    add("--first", type=int, default=8000, help="tokens of a conversation's first turn (default: %(default)s)")
    add("--grow", type=int, default=4000, help="tokens that a turn adds (default: %(default)s)")
    add("--turns", type=int, default=7, help="of each model (default: %(default)s)")
    add("--limit-s", type=float, default=290.0, help="seconds that all of it may take (default: %(default)s)")
    add("--work", type=Path, default=Path("/tmp/serve-kept-kv"), help="folder for configurations")
    add("--server-command", default="", help="instead of vLLM's; its results are marked as simulated")
    arguments = parser.parse_args()
    exit_on_sigterm()
    begin = time.monotonic()
    is_simulated = SIMULATED or bool(arguments.server_command)
    for folder in (arguments.work, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    keep_bytes = kv_bytes(arguments.shape, arguments.first + arguments.grow * arguments.turns, "auto")
    facts: Facts = {
        "machine": {"simulated": True, "command": command()} if is_simulated else machine_apart("vllm"),
        "shape": arguments.shape,
        "keep_bytes": keep_bytes,
        "ways": {},
        "failed": {},
        "rows": [],
    }
    if not is_simulated:
        # The front looks up what the host has left. Some virtual machines show only what has been used.
        touch_host_memory(2 * (SHAPES[arguments.shape].weights_bytes + keep_bytes) + (4 << 30))
    for way, nbytes, share in (("kept", keep_bytes, 0.5), ("cleared", 0, 1.0)):
        left_s = arguments.limit_s - (time.monotonic() - begin) - 5.0
        try:
            facts["ways"][way] = one_way(arguments, nbytes, share * left_s, facts["rows"])
        except (Failed, OutOfTime, OSError, http.client.HTTPException, ValueError, KeyError) as error:
            facts["failed"][way] = f"{type(error).__name__}: {error}"
        facts["summary"] = summary(facts["rows"])
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")
    for row in facts["summary"]:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    for way, error in facts["failed"].items():
        print(f"FAILED {way}: {error}")
    sys.exit(bool(facts["failed"]))


if __name__ == "__main__":
    main()
