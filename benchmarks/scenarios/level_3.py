"""`vllm serve` at level 3 where something is in its way: too little memory."""

from __future__ import annotations

import time
from pathlib import Path

from .engines import PROMPTS
from .gate import DEV_MODE, GatedServer
from .ranks import gpu_is_full
from .registry import Facts, check, scenario, timed

PORT = 8151
DEEP_AFTER_S = 2.0
DEEP_WITHIN_S = 30.0


def levels(server: GatedServer) -> list[int]:
    """How deep each worker sleeps, by the gate's metrics."""
    lines = server.expect(200, "GET", "/metrics").splitlines()
    found = [int(float(line.split()[-1])) for line in lines if line.startswith("cumem_sleep_sleep_level{")]
    check("metrics say the level", found)
    return found


@scenario(alone=True, CUMEM_SLEEP_ON_REQUEST="reject", CUMEM_SLEEP_DEEP_AFTER_S=f"{DEEP_AFTER_S:g}", **DEV_MODE)
def level_3_with_little_memory(folder: Path) -> Facts:
    """No wake while the GPU is full; then the retry works."""
    facts: Facts = {}
    with GatedServer(folder, "level_3_memory", PORT + 1) as server:
        _, before = server.tokens(PROMPTS[0])
        for _ in range(2):
            server.expect(200, "POST", "/sleep?level=1")
            with timed(facts, "until it is at level 3, s"):
                ends_at = time.monotonic() + DEEP_WITHIN_S
                while levels(server) != [3]:
                    check("it goes to level 3", time.monotonic() < ends_at)
                    time.sleep(0.1)
            with gpu_is_full(0):
                with timed(facts, "a wake without room fails after, s"):
                    status, _, answer = server.ask("POST", "/wake")
                facts["answer without room"] = [status, answer]
                check(f"the wake fails: {status} {answer}", status >= 400)
                check(f"and says what is missing: {answer}", "memory" in str(answer).lower())
                check("it is at level 3 still", levels(server) == [3])
                check("and says that it sleeps", server.expect(200, "GET", "/is_sleeping")["is_sleeping"])
                check("a request is rejected", server.tokens(PROMPTS[0])[0] == 503)
            with timed(facts, "retry s"):
                server.expect(200, "POST", "/wake")
            check("tokens after the retry", server.tokens(PROMPTS[0]) == (200, before))
    return facts
