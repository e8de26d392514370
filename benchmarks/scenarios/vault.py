"""Real vLLM whose backups a vault keeps: two servers of one model, and the ranks of one engine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .engines import GIB, PROMPTS
from .gate import DEV_MODE, GatedServer
from .parallel import cycles_of_ranks, engine_of_ranks, statuses
from .registry import Facts, check, scenario, timed

PORT = 8141
# vLLM's sampler counts each request's tokens among the weights, in max_num_seqs x vocabulary x 4 bytes: 594 MiB with
# the default for a large GPU (1024), half as much as this model has.
OPTIONS = ("--max-num-seqs", "16", "--worker-extension-cls", "worker_extension.Extension")


def _bytes_of(server: GatedServer, operation: str) -> dict[str, int]:
    (status,) = server.expect(200, "POST", "/collective_rpc", {"method": "cumem_sleep_status"})["results"]
    found: dict[str, int] = status["operations"].get(operation, {"bytes": {}})["bytes"]
    return found


def check_found(first: dict[str, int], second: dict[str, int]) -> None:
    """The first sleep of the second server found nearly all that of the first has copied."""
    found = second["found"] > 0.9 * first["copied"] and second["copied"] < 0.1 * first["copied"]
    check(f"the second finds what the first has copied: {first}, {second}", found)


@scenario(CUMEM_SLEEP_PREPARE="0", **DEV_MODE)
def two_servers_through_the_vault(folder: Path) -> Facts:
    """The second finds nearly all bytes there."""
    from vault_process import Vault

    facts: Facts = {}
    with Vault(4 * GIB) as vault, ExitStack() as stack:
        facts["vault ready s"] = vault.wait_until_pinned()
        os.environ["CUMEM_SLEEP_VAULT"] = vault.socket
        servers = [stack.enter_context(GatedServer(folder, f"vault_{n}", PORT + n, *OPTIONS)) for n in range(2)]
        before = [server.tokens(prompt) for server in servers for prompt in PROMPTS[:4]]
        check("both say the same", before[:4] == before[4:] and before[0][0] == 200)
        for number, server in enumerate(servers):
            with timed(facts, "first sleeps s"):
                server.expect(200, "POST", "/sleep?level=1")
            facts[f"bytes of the first sleep of server {number + 1}"] = _bytes_of(server, "sleep")
        status = vault.status()
        facts["vault while both sleep"] = status
        first, second = (facts[f"bytes of the first sleep of server {number}"] for number in (1, 2))
        check_found(first, second)
        check("one copy is kept", status["asleep_bytes"] < 1.15 * first["copied"])
        for _ in range(2):
            for server in servers:
                with timed(facts, "wakes s"):
                    server.expect(200, "POST", "/wake_up")
            check("tokens", [server.tokens(prompt) for server in servers for prompt in PROMPTS[:4]] == before)
            for server in servers:
                with timed(facts, "later sleeps s"):
                    server.expect(200, "POST", "/sleep?level=1")
        for server in servers:
            server.expect(200, "POST", "/wake_up")
    return facts


def _through_a_vault(folder: Path, nbytes: int, **options: Any) -> Facts:
    from vault_process import Vault

    facts: Facts = {}
    with Vault(nbytes) as vault:
        facts["vault ready s"] = vault.wait_until_pinned()
        os.environ["CUMEM_SLEEP_VAULT"] = vault.socket
        llm = engine_of_ranks(folder, **options)
        cycles_of_ranks(llm, facts)
        places = [status["place"]["vault"] for status in statuses(llm)]
        check(f"backups of both ranks are in the vault: {places}", places == [vault.socket] * 2)
        facts["vault"] = vault.status()
        llm.llm_engine.engine_core.shutdown()
    return facts


@scenario(gpus=2)
def tensor_parallel_2_through_the_vault(folder: Path) -> Facts:
    """One vault serves both GPUs."""
    return _through_a_vault(folder, 4 * GIB, tensor_parallel_size=2)


@scenario(gpus=2, CUMEM_SLEEP_PREPARE="0", **DEV_MODE)
def replicas_on_two_gpus(folder: Path) -> Facts:
    """Through one vault, which keeps one copy."""
    from vault_process import Vault

    facts: Facts = {}
    with Vault(4 * GIB) as vault, ExitStack() as stack:
        vault.wait_until_pinned()
        os.environ["CUMEM_SLEEP_VAULT"] = vault.socket
        servers = []
        for gpu in range(2):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            servers.append(stack.enter_context(GatedServer(folder, f"replica_{gpu}", PORT + 10 + gpu, *OPTIONS)))
        before = [server.tokens(PROMPTS[0]) for server in servers]
        check("both say the same", before[0] == before[1] and before[0][0] == 200)
        for server in servers:
            with timed(facts, "first sleeps s"):
                server.expect(200, "POST", "/sleep?level=1")
        facts["vault while both sleep"] = status = vault.status()
        first, second = (_bytes_of(server, "sleep") for server in servers)
        facts["bytes of the first sleeps"] = [first, second]
        check_found(first, second)
        check("one copy is kept", status["asleep_bytes"] < 1.15 * first["copied"])
        for server in servers:
            with timed(facts, "wakes s"):
                server.expect(200, "POST", "/wake_up")
        check("tokens", [server.tokens(PROMPTS[0]) for server in servers] == before)
    return facts
