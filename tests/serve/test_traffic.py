"""Random traffic through `cumem-sleep serve`, as a process, over servers at which much goes wrong.

It prints what became of the requests. For long:

    SERVE_REQUESTS=50000 SERVE_FAULTS=0.2 pytest -m slow tests/serve/test_traffic.py -s
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faulty_server import lives
from odd_clients import odd
from servers_of_tests import FAULTY

REQUESTS = int(os.environ.get("SERVE_REQUESTS", "400"))
FAULTS = float(os.environ.get("SERVE_FAULTS", "1.0"))  # 1: a change of a server in three goes wrong, or is slow
ODD = 0.15  # of the clients, before their own requests
CLIENTS = 48
WAIT_S = 60.0
KEEP_S, DRAIN_S = 0.3, 0.5
# With more host memory than this machine may have: where it is short, nothing sleeps at level 1, and nothing is kept.
FRONT = """\
import sys
from cumem_sleep.__main__ import main
from cumem_sleep.serve import hardware
hardware.host_available_bytes = lambda *_: 1 << 40
sys.exit(main())
"""
LEFT_WITHIN_S = 20.0  # until it is noticed that a client has left
PATIENT_S = 300.0  # of waiting and draining, where nobody is to be refused: on a busy machine everything takes longer
GPUS = {f"model-{number}": [[0], [1]][number % 2] if number < 8 else [0, 1] for number in range(10)}
ENGINES_OF = {4: "sglang", 5: "command", 6: "sglang", 9: "command"}  # by number; all others are vLLM's
SHELLS = ("exec {}", "{}; true", "(setsid sleep 86400 &); {}; true", "sleep 86400 & setsid --wait {}; true")
IDLE = {"vllm": {1: "1s", 2: "3s"}, "sglang": {1: "1s"}, "command": {"stop": "2s"}}
SABOTAGE_EVERY_S = 4.0
FLAT_BYTES = 24 << 20  # what the front's memory may grow by after the first tenth of the requests, however many come


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        odd: what else came, of `odd_clients`.
        switches_s: the longest sleep, wake and start that was seen.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    odd: int = 0
    longest_s: float = 0.0
    switches_s: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def models_yaml(folder: Path, faults: float) -> Path:
    for number in (0, 1):
        (folder / f"gpu{number}").mkdir(exist_ok=True)
    models: dict[str, Any] = {}
    for seed, (name, gpus) in enumerate(GPUS.items()):
        folders = " ".join(str(folder / f"gpu{gpu}") for gpu in gpus)
        engine = ENGINES_OF.get(seed, "vllm")
        command = f"{FAULTY} --engine {engine} --uds {{socket}} --served-model-name {name} --gpus {folders}"
        command += f" --record {folder / 'record'} --executed {folder / 'executed'} --faults {faults} --seed {seed}"
        limits = {"wait": WAIT_S, "drain": DRAIN_S} if faults else {"wait": PATIENT_S, "drain": PATIENT_S}
        common = {**limits, "idle": IDLE[engine], "host_memory": "10GiB"}
        if engine == "command":
            common["health"] = "/ready"
        models[name] = {
            "engine": engine,
            "command": ["sh", "-c", SHELLS[seed % len(SHELLS)].format(command)],
            "gpus": gpus,
            "at_start": ["asleep", "awake", "stopped"][seed % 3],
            **common,
        }
    models["model-3"]["keep"] = KEEP_S
    file = folder / "models.yaml"
    front = {"port": 0, "admin_token": "secret"}
    whole = {"front": front, "logs": str(folder / "logs"), "host_memory": "45GiB", "models": models}
    file.write_text(json.dumps(whole, indent=1))
    return file


@asynccontextmanager
async def front(folder: Path, faults: float, end: signal.Signals = signal.SIGTERM) -> AsyncIterator[tuple[int, int]]:
    """The command, as a process: its port and its pid. It ends with this signal."""
    command = [sys.executable, "-c", FRONT, "serve", str(models_yaml(folder, faults))]
    log = (folder / "front.log").open("wb")
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        while "listens at" not in (folder / "front.log").read_text():
            assert process.returncode is None, (folder / "front.log").read_text()
            await asyncio.sleep(0.05)
        port = (folder / "front.log").read_text().partition("listens at http://127.0.0.1:")[2].partition(";")[0]
        yield int(port), process.pid
    finally:
        if process.returncode is None:
            process.send_signal(end)
        await process.wait()
    assert process.returncode == (0 if end is signal.SIGTERM else -end)


async def ask(port: int, path: str, body: dict[str, Any] | None, leaves_after: float | None = None) -> Answer | None:
    """One request on a connection of its own; None if the client left before the end of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode() if body is not None else b""
        method = "POST" if body is not None else "GET"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer secret\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        try:
            whole = await asyncio.wait_for(reader.read(-1), leaves_after)
        except asyncio.TimeoutError:
            return None
    finally:
        writer.close()
    return parse(whole)


def parse(whole: bytes) -> Answer:
    head, _, body = whole.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    is_whole = True
    if headers.get("transfer-encoding") == "chunked":
        pieces, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        is_whole = bool(pieces) and pieces[-1] == b""
        body = b"".join(pieces)
    elif "content-length" in headers:
        is_whole = len(body) == int(headers["content-length"])
    return Answer(int(first.split()[1]), headers, body, is_whole)


def judge(answer: Answer, name: str, words: int, streams: bool) -> str:
    """What became of a request; an empty word for what must not be."""
    if answer.status in (502, 503):
        error = json.loads(answer.body)["error"]
        is_right = error["message"] and (answer.status == 502 or int(answer.headers["retry-after"]) >= 1)
        return f"refused with {answer.status}" if is_right and answer.is_whole else ""
    if answer.status != 200:
        return ""
    if not streams:
        if not answer.is_whole:
            return "broke off"
        text = json.loads(answer.body)["choices"][0]["text"]
        return (
            "answered"
            if f"This is {name},".startswith(" ".join(text.split()[:3])) and len(text.split()) == words
            else ""
        )
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line.startswith("data: ")]
    if not answer.is_whole or not events or events[-1] != "[DONE]":
        return "broke off"
    if any("error" in json.loads(event) for event in events[:-1]):
        return "ended with an error"
    texts = [json.loads(event)["choices"][0]["text"].strip() for event in events[:-1]]
    if texts[-1:] == [""] and json.loads(events[-2])["choices"][0]["finish_reason"] == "stop":
        del texts[-1]  # the last one says why it ends
    return "answered" if is_answer(texts, name, words) else ""


def is_answer(texts: list[str], name: str, words: int) -> bool:
    return len(texts) == words and f"This is {name},".startswith(" ".join(texts[:3]))


async def client(port: int, chance: random.Random, numbers: list[int], tally: Tally) -> None:
    while numbers:
        number = numbers.pop()
        if chance.random() < ODD:
            tally.odd += 1
            wrong = await odd(port, chance, chance.choice(list(GPUS)), f"odd-{number}", list(GPUS))
            tally.wrong += [wrong] if wrong else []
        name = f"model-{min(int(chance.expovariate(0.35)) + number // 400, 99) % len(GPUS)}"
        words, streams = chance.randint(1, 12), chance.random() < 0.6
        body = {"model": name, "user": str(number), "max_tokens": words, "stream": streams}
        body["prompt"] = "?" * chance.choice((1, 100, 20000))
        leaves_after = chance.uniform(0.0, 0.3) if chance.random() < 0.1 else None
        started = time.monotonic()
        answer = await ask(port, "/v1/completions", body, leaves_after)
        if answer is None:
            tally.outcomes["left"] += 1
            continue
        tally.longest_s = max(tally.longest_s, time.monotonic() - started)
        outcome = judge(answer, name, words, streams)
        tally.outcomes[outcome] += 1
        if not outcome:
            tally.wrong.append(f"{name}: {answer}")
        if chance.random() < 0.02:
            await asyncio.sleep(chance.uniform(0.0, 0.5))


def below(pid: int) -> list[int]:
    """All processes that this one and those below it have started."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found[1:]


def words_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def started_for(folder: Path, words: str) -> bool:
    """Whether a command is one of this test's: a pid may be somebody else's by now."""
    return str(folder) in words or words == "sleep 86400 "


async def sabotage(pid: int, chance: random.Random, numbers: list[int]) -> None:
    """Kill reapers, shells and servers, at random."""
    while numbers:
        await asyncio.sleep(chance.uniform(0.0, 2 * SABOTAGE_EVERY_S))
        if numbers and (found := below(pid)):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)


async def watch(port: int, pid: int, numbers: list[int], total: int, tally: Tally, sizes: list[int]) -> None:
    """The status never shows more than there is; the front's memory is sampled."""
    while numbers:
        answer = await ask(port, "/status", None)
        assert answer is not None
        status = json.loads(answer.body)
        for gpu in status["gpus"]:
            assert sum(holder["share"] for holder in gpu["holders"]) <= 1, gpu
        for switch in filter(None, (model["last_switch"] for model in status["models"])):
            tally.switches_s[switch["kind"]] = max(tally.switches_s.get(switch["kind"], 0.0), switch["seconds"])
        assert status["host"]["held_bytes"] <= status["host"]["budget_bytes"]
        if len(numbers) < 0.9 * total:
            sizes.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        await asyncio.sleep(0.1)


async def traffic(folder: Path, total: int, faults: float) -> tuple[Tally, list[int]]:
    chance, tally, sizes = random.Random(total), Tally(), [0]
    numbers = list(range(total))
    async with front(folder, faults) as (port, pid):
        clients = [client(port, random.Random(chance.random()), numbers, tally) for _ in range(CLIENTS)]
        sizes.clear()
        others = [sabotage(pid, random.Random(total), numbers)] if faults else []
        await asyncio.gather(*clients, *others, watch(port, pid, numbers, total, tally, sizes))
        deadline = time.monotonic() + LEFT_WITHIN_S
        while lost := await not_ended(port):
            assert time.monotonic() < deadline, f"somebody was lost: {lost}"
            await asyncio.sleep(0.1)
        log = (folder / "front.log").read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    return tally, sizes


async def not_ended(port: int) -> list[dict[str, Any]]:
    answer = await ask(port, "/status", None)
    assert answer is not None
    return [model for model in json.loads(answer.body)["models"] if model["waiting"] or model["running"]]


def longest_wait_s(switches_s: dict[str, float], drain_s: float) -> float:
    """One turn of each model, as the documentation promises where nothing fails; the last one is the request's own."""
    until_awake_s = max(switches_s.get("wake", 0.0), switches_s.get("start", 0.0))
    until_away_s = max(switches_s.get("sleep", 0.0), switches_s.get("stop", 0.0))
    return KEEP_S + len(GPUS) * (drain_s + until_away_s + until_awake_s)  # one model has a `keep`


def check(folder: Path, total: int, faults: float) -> None:
    started = time.monotonic()
    tally, sizes = asyncio.run(traffic(folder, total, faults))
    record = folder / "record"
    print(
        f"\n{total} requests in {time.monotonic() - started:.0f} s: {dict(tally.outcomes)}, {tally.odd} odd;", end=" "
    )
    print(f"the longest took {tally.longest_s:.1f} s; memory {min(sizes) >> 20} to {max(sizes) >> 20} MiB")
    assert not record.exists(), record.read_text()
    executed = Counter((folder / "executed").read_text().split())
    assert not (twice := [number for number, times in executed.items() if times > 1 and number.isdecimal()]), (
        f"run twice: {twice}"
    )
    assert executed.total() >= tally.outcomes["answered"]
    assert not executed["never"], "somebody asked from elsewhere"
    assert not tally.wrong, tally.wrong[:3]
    assert tally.outcomes.total() == total
    assert "gives up the KV cache" in (folder / "front.log").read_text()
    assert max(sizes) - sizes[0] <= FLAT_BYTES
    if faults:
        assert tally.longest_s <= WAIT_S + 40
    else:
        assert tally.outcomes.keys() <= {"answered", "left"}
        lasted_s = max(map(float, (folder / "lasted").read_text().split()))  # nothing else is waited for to drain one
        assert tally.longest_s <= longest_wait_s(tally.switches_s, lasted_s), (lasted_s, tally)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_while_much_goes_wrong(tmp_path: Path) -> None:
    check(tmp_path, REQUESTS, FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_while_nothing_goes_wrong(tmp_path: Path) -> None:
    check(tmp_path, REQUESTS, faults=0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_through_fronts_that_are_killed(tmp_path: Path) -> None:
    """The next one has the GPUs to itself: whoever meets another one's memory there records it."""
    chance = random.Random(REQUESTS)

    async def through_one(faults: float, end: signal.Signals, total: int) -> list[int]:
        tally, numbers = Tally(), list(range(total))
        async with front(tmp_path, faults, end) as (port, pid):
            clients = [client(port, random.Random(chance.random()), numbers, tally) for _ in range(CLIENTS // 4)]
            asking = asyncio.gather(*clients, return_exceptions=True)
            await asyncio.wait({asking}, timeout=chance.uniform(1.0, 6.0) if end is signal.SIGKILL else None)
            left = below(pid)
        await asking
        assert end is signal.SIGKILL or tally.outcomes.keys() <= {"answered", "left"}
        return left

    async def through_all() -> list[int]:
        left = []
        for _ in range(3):
            left += await through_one(0.0, signal.SIGKILL, 1 << 20)
        return left + await through_one(0.0, signal.SIGTERM, 40)

    left = asyncio.run(through_all())
    assert left
    assert [words for pid in left if lives(str(pid)) and started_for(tmp_path, words := words_of(pid))] == []
    assert not (tmp_path / "record").exists(), (tmp_path / "record").read_text()
