"""`vllm serve` behind the gate."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .engines import KV_CACHE_BYTES, PROMPTS
from .registry import LIMIT_S, Facts, check, scenario, timed

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}


class GatedServer:
    """`vllm serve` of the small model behind the gate."""

    def __init__(self, folder: Path, name: str, port: int, *options: str) -> None:
        from model_server import Deadline, Server

        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--skip-tokenizer-init", "--enable-sleep-mode", "--enforce-eager", "--max-model-len", "2048"),
            *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--middleware", "cumem_sleep.vllm.SleepGate", *options),
        ]
        log = folder.parent / f"serve_{name}.log"
        self.port = port
        self.server = Server("model", command, port, {}, log, Deadline(LIMIT_S - 20))

    def __enter__(self) -> GatedServer:
        self.server.start(180)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        print(self.server.log.read_text(errors="replace"))

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        with contextlib.suppress(json.JSONDecodeError):
            content = json.loads(content)
        return response.status, dict(response.getheaders()), content

    def expect(self, status: int, method: str, path: str, body: object = None, token: str = "") -> Any:
        found, _, content = self.ask(method, path, body, token)
        check(f"{method} {path}: {found} {content}", found == status)
        return content

    def tokens(self, prompt: list[int], token: str = "", *, max_tokens: int = 24) -> tuple[int, Any]:
        """Status, and the greedy tokens or the error."""
        request = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, _, content = self.ask("POST", "/v1/completions", {**request, "return_token_ids": True}, token)
        return status, content["choices"][0]["token_ids"] if status == 200 else content

    def wakes(self) -> int:
        (status,) = self.expect(200, "POST", "/collective_rpc", {"method": "cumem_sleep_status"})["results"]
        return int(status["operations"].get("wake", {"count": 0})["count"])


@scenario(CUMEM_SLEEP_ON_REQUEST="reject", **DEV_MODE)
def gate_rejects(folder: Path) -> Facts:
    """503 while asleep, metrics, level 2 without a reload."""
    facts: Facts = {}
    with GatedServer(folder, "reject", 8101) as server:
        _, before = server.tokens(PROMPTS[0])
        server.expect(200, "POST", "/sleep?level=1")
        status, headers, content = server.ask("POST", "/v1/completions", {"model": "model", "prompt": PROMPTS[0]})
        facts["asleep"] = [status, headers.get("retry-after"), content]
        check("503 with Retry-After and an error in OpenAI's shape", status == 503 and headers["retry-after"])
        facts["health asleep"] = server.expect(503, "GET", "/health")
        server.expect(200, "POST", "/sleep?level=1")
        server.expect(409, "POST", "/reload_weights")
        server.expect(409, "POST", "/resume")
        server.expect(200, "POST", "/wake?tags=weights")
        check("half awake it does not answer", server.tokens(PROMPTS[0])[0] == 503)
        server.expect(200, "POST", "/wake")
        server.expect(200, "GET", "/health")
        check("tokens", server.tokens(PROMPTS[0]) == (200, before))
        server.expect(200, "POST", "/sleep?level=2")
        server.expect(200, "POST", "/wake_up")
        status, content = server.tokens(PROMPTS[0])
        facts["after level 2 without a reload"] = [status, content]
        check("no garbage is served", status == 503)
        server.expect(200, "POST", "/reload_weights")
        check("tokens after the reload", server.tokens(PROMPTS[0]) == (200, before))
        metrics = server.expect(200, "GET", "/metrics").splitlines()
        facts["metrics"] = [line for line in metrics if line.startswith("cumem_sleep_")]
        check("metrics", any("operations_total" in line for line in facts["metrics"]))
    return facts


@scenario(CUMEM_SLEEP_ON_REQUEST="wake", **DEV_MODE)
def gate_wakes(folder: Path) -> Facts:
    """Many requests wake the server once, at level 2 as well."""
    facts: Facts = {}
    with GatedServer(folder, "wake", 8102) as server:
        before = [server.tokens(prompt)[1] for prompt in PROMPTS[:4]]
        for level in (0, 1, 2):
            server.expect(200, "POST", "/reset_prefix_cache")
            server.expect(200, "POST", f"/sleep?level={level}")
            facts[f"health at level {level}"] = server.expect(200, "GET", "/health")
            wakes = server.wakes()
            with timed(facts, f"answer at level {level} s"):
                check(f"tokens of the first at level {level}", server.tokens(PROMPTS[0]) == (200, before[0]))
            server.expect(200, "POST", f"/sleep?level={level}")
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda prompt: server.tokens(prompt)[0], PROMPTS[:4]))
            check(f"four at once are answered at level {level}: {answers}", answers == [200] * 4)
            facts[f"wakes of the layer at level {level}"] = server.wakes() - wakes
            check("one wake each", server.wakes() - wakes == (0, 2, 4)[level])  # at level 2 one for each tag
            # What four at once left in the prefix cache is rounded differently.
            server.expect(200, "POST", "/reset_prefix_cache")
            check(f"tokens at level {level}", [server.tokens(prompt)[1] for prompt in PROMPTS[:4]] == before)
    return facts


@scenario(CUMEM_SLEEP_ON_REQUEST="wait", CUMEM_SLEEP_REQUEST_DEADLINE_S="4", **DEV_MODE)
def gate_waits(folder: Path) -> Facts:
    """Requests are held until a wake, or their deadline."""
    facts: Facts = {}
    with GatedServer(folder, "wait", 8103) as server, ThreadPoolExecutor(2) as pool:
        _, before = server.tokens(PROMPTS[0])
        server.expect(200, "POST", "/sleep?level=1")
        held = pool.submit(server.tokens, PROMPTS[0])
        time.sleep(1)
        check("it is held", not held.done())
        server.expect(200, "POST", "/wake_up")
        check("tokens of the request that was held", held.result() == (200, before))
        server.expect(200, "POST", "/sleep?level=1")
        with timed(facts, "until the deadline s"):
            facts["at the deadline"] = server.tokens(PROMPTS[0])
        check("503 at the deadline", facts["at the deadline"][0] == 503)
        server.expect(200, "POST", "/wake_up")
        for mode in ("abort", "wait"):
            running = pool.submit(server.tokens, PROMPTS[1], max_tokens=400)
            time.sleep(1)
            with timed(facts, f"sleep beside a running request, mode {mode}, s"):
                server.expect(200, "POST", f"/sleep?level=1&mode={mode}")
            status, answer = running.result()
            facts[f"the running request, mode {mode}"] = [status, len(answer) if status == 200 else answer]
            check("it ended", status == 200)
            check(f"mode {mode}: {len(answer)} of 400 tokens", (len(answer) == 400) == (mode == "wait"))
            server.expect(200, "POST", "/wake_up")
            check(f"tokens after mode {mode}", server.tokens(PROMPTS[0]) == (200, before))
    return facts


@scenario(CUMEM_SLEEP_ADMIN_TOKEN="sesame", CUMEM_SLEEP_ON_REQUEST="wake", **DEV_MODE)
def gate_guards(folder: Path) -> Facts:
    """The admin token; no wake without an API key."""
    facts: Facts = {}
    with GatedServer(folder, "guard", 8104, "--api-key", "key") as server:
        _, before = server.tokens(PROMPTS[0], "key")
        for path in ("/sleep", "/wake_up", "/wake", "/reload_weights", "/collective_rpc"):
            server.expect(401, "POST", path)
            server.expect(401, "POST", path, token="key")
        server.expect(200, "POST", "/sleep", token="sesame")
        check("401 without the API key", server.tokens(PROMPTS[0])[0] == 401)
        facts["asleep still"] = server.expect(200, "GET", "/is_sleeping")
        check("and it sleeps on", facts["asleep still"] == {"is_sleeping": True})
        check("tokens", server.tokens(PROMPTS[0], "key") == (200, before))
    return facts
