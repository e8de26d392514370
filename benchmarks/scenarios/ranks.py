"""Two workers of one engine, and one of them cannot: both sleep or wake, or neither does, and that is what is said."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .engines import PROMPTS
from .gate import DEV_MODE, GatedServer
from .registry import Facts, check, scenario, timed

PORT = 8131
TENSOR_PARALLEL = ("--tensor-parallel-size", "2", "--worker-extension-cls", "worker_extension.Extension")
LEFT_BYTES = 256 << 20  # too little for any rank's wake
ENDS_WITHIN_S = 60.0  # an engine whose worker was killed
ILL_WITHIN_S = 10.0

# Another process, which takes what the GPU has but for so many bytes, until its input ends.
TAKES_ALL = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def gpu_is_full(gpu: int) -> Iterator[None]:
    """Another process holds the memory of this GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_ALL, str(LEFT_BYTES)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        check("the other process has the memory", process.stdout.readline() == "taken\n")
        yield
    finally:
        process.communicate()


def asleep(server: GatedServer) -> list[bool]:
    """Whether all of a rank's memory sleeps; a rank is awake if none does."""
    states = []
    for status in server.expect(200, "POST", "/collective_rpc", {"method": "cumem_sleep_status"})["results"]:
        usages = list(status["usage"].values())
        sleeping = [usage["asleep_segments"] for usage in usages]
        check("a rank is not half asleep", not any(sleeping) or sleeping == [usage["segments"] for usage in usages])
        states.append(any(sleeping))
    return states


def log_of(server: GatedServer) -> str:
    return server.server.log.read_text(errors="replace")


def names(text: str, rank: int) -> bool:
    """Whether an error names this rank, in its own words or in those of the others."""
    return f"this was rank {rank}" in text or f"rank {rank} of 2" in text


def states_are_true(server: GatedServer, facts: Facts, when: str) -> None:
    """What `/is_sleeping` and the workers say is what a request finds."""
    says = server.expect(200, "GET", "/is_sleeping")["is_sleeping"]
    status, _ = server.tokens(PROMPTS[0])
    facts[when] = {"is_sleeping": says, "memory of the ranks sleeps": asleep(server), "a request gets": status}
    check(f"{when}: what it says is so", says == (status != 200))


def fails(server: GatedServer, facts: Facts, path: str, rank: int, kept: list[bool]) -> None:
    """A call that one rank cannot carry out: it is named, and all ranks are as they were."""
    before = len(log_of(server))
    with timed(facts, f"{path} fails s"):
        status, _, answer = server.ask("POST", path)
    told = f"{answer}\n{log_of(server)[before:]}"
    facts.setdefault("answers", []).append([path, rank, status, answer])
    facts.setdefault("errors", []).extend([line[-400:] for line in told.splitlines() if names(line, rank)][:2])
    check(f"{path} fails: {status}", status >= 400)
    check(f"the error names rank {rank}", names(told, rank))
    check(f"no rank went on: {asleep(server)}", asleep(server) == kept)
    states_are_true(server, facts, f"{path} has failed for rank {rank}")


@scenario(gpus=2, alone=True, CUMEM_SLEEP_ON_REQUEST="reject", **DEV_MODE)
def rank_without_device_memory(folder: Path) -> Facts:
    """No rank wakes, the error names it, the retry works."""
    facts: Facts = {}
    with GatedServer(folder, "device_memory", PORT, *TENSOR_PARALLEL) as server:
        _, before = server.tokens(PROMPTS[0])
        for rank in (1, 0):
            server.expect(200, "POST", "/sleep?level=1")
            with gpu_is_full(rank):
                fails(server, facts, "/wake_up", rank, [True, True])
            with timed(facts, "retry s"):
                server.expect(200, "POST", "/wake_up")
            check("all ranks are awake", asleep(server) == [False, False])
            check(f"tokens after the retry, rank {rank}", server.tokens(PROMPTS[0]) == (200, before))
    return facts


@scenario(gpus=2, CUMEM_SLEEP_ON_REQUEST="reject", **DEV_MODE)
def rank_without_host_memory(folder: Path) -> Facts:
    """No rank sleeps, the error names it, the retry works."""
    facts: Facts = {}

    def limit(rank: int, nbytes: str) -> None:
        call = {"method": "limit_host_memory", "args": [str(rank), nbytes]}
        server.expect(200, "POST", "/collective_rpc", call)

    with GatedServer(folder, "host_memory", PORT + 1, *TENSOR_PARALLEL) as server:
        _, before = server.tokens(PROMPTS[0])
        for rank in (1, 0):
            limit(rank, str(16 << 20))
            fails(server, facts, "/sleep?level=1", rank, [False, False])
            limit(rank, "")
            with timed(facts, "retry s"):
                server.expect(200, "POST", "/sleep?level=1")
            check("all ranks sleep", asleep(server) == [True, True])
            server.expect(200, "POST", "/wake_up")
            check(f"tokens after the retry, rank {rank}", server.tokens(PROMPTS[0]) == (200, before))
            server.expect(200, "POST", "/collective_rpc", {"method": "forget_backups"})  # the next sleep needs memory
    return facts


def process_of(server: GatedServer, rank: int) -> int:
    return int(server.expect(200, "POST", "/collective_rpc", {"method": "process_id"})["results"][rank])


PROBED = {"CUMEM_SLEEP_ON_REQUEST": "reject", "CUMEM_SLEEP_HEALTH": "ok", "CUMEM_SLEEP_AGREEMENT_TIMEOUT_S": "5"}


@scenario(gpus=2, alone=True, **PROBED, **DEV_MODE)
def rank_stopped_and_killed(folder: Path) -> Facts:
    """Stopped in a wake, the retry works; killed, the engine ends."""
    from model_server import gpu_memory_in_use_bytes

    facts: Facts = {}
    empty = [gpu_memory_in_use_bytes(gpu) or 0 for gpu in range(2)]
    with GatedServer(folder, "killed", PORT + 2, *TENSOR_PARALLEL) as server, ThreadPoolExecutor(1) as pool:
        _, before = server.tokens(PROMPTS[0])
        rank_1 = process_of(server, 1)
        server.expect(200, "POST", "/sleep?level=1")
        facts["what is left, by rank"] = found = re.findall(r"[\d.]+ .iB left on the GPU[^;\n]*", log_of(server))
        check(f"NCCL has an item: {found}", sum("iB NCCL" in each for each in found) == 2)
        stop(rank_1)
        try:
            wake: Future[Any] = pool.submit(server.ask, "POST", "/wake_up")
            _until(lambda: "did not begin within" in log_of(server), 30, "rank 0 gives up")
        finally:
            os.kill(rank_1, signal.SIGCONT)
        status, _, answer = wake.result()
        facts["answer of the stopped wake"] = [status, answer]
        check("the wake failed", status >= 400)
        check("and names rank 1", names(f"{answer}\n{log_of(server)}", 1))
        check("no rank is awake", asleep(server) == [True, True])
        states_are_true(server, facts, "rank 1 was stopped")
        server.expect(200, "POST", "/wake_up")
        check("tokens after the retry", server.tokens(PROMPTS[0]) == (200, before))

        killed_in_a_wake(server, facts, rank_1, pool)
    left = [gpu_memory_in_use_bytes(gpu) or 0 for gpu in range(2)]
    facts["bytes on the GPUs before and after"] = [empty, left]
    check(f"nothing is left: {empty}, {left}", all(b <= a + (64 << 20) for a, b in zip(empty, left, strict=True)))
    return facts


def killed_in_a_wake(server: GatedServer, facts: Facts, process: int, pool: ThreadPoolExecutor) -> None:
    """The call ends, without success, and the server says within some seconds that it is not well."""
    server.expect(200, "POST", "/sleep?level=1")
    server.expect(200, "GET", "/health")
    stop(process)
    wake = pool.submit(_ask_who_may_end, server, "POST", "/wake_up")
    time.sleep(1)  # the other rank waits for it by now
    with timed(facts, "until the call ends s"):
        os.kill(process, signal.SIGKILL)
        facts["answer of the wake whose rank was killed"] = ended = wake.result(ENDS_WITHIN_S)
    check("the call does not succeed", ended[0] != 200)
    facts["health"] = health = [_ask_who_may_end(server, "GET", "/health")]

    def is_ill() -> bool:
        health[1:] = [_ask_who_may_end(server, "GET", "/health")]
        return bool(health[-1][0] != 200)

    with timed(facts, "until health says so s"):  # vLLM learns of it in another process
        _until(is_ill, ILL_WITHIN_S, "the server says that it is not well")
    check("a request is not answered", _ask_who_may_end(server, "POST", "/v1/completions", "x")[0] != 200)


def stop(process: int) -> None:
    """Returns when it is stopped."""
    os.kill(process, signal.SIGSTOP)
    stat = Path(f"/proc/{process}/stat")
    _until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10, "it is stopped")


def _ask_who_may_end(server: GatedServer, method: str, path: str, prompt: str = "") -> list[Any]:
    """Status and answer; 0 if nobody answers any more."""
    body = {"model": "model", "prompt": PROMPTS[0]} if prompt else None
    try:
        status, _, answer = server.ask(method, path, body)
    except (OSError, http.client.HTTPException) as error:
        return [0, f"{type(error).__name__}: {error}"]
    return [status, answer]


def _until(is_so: Any, limit_s: float, what: str) -> None:
    ends_at = time.monotonic() + limit_s
    while not is_so():
        check(f"never: {what}", time.monotonic() < ends_at)
        time.sleep(0.05)
