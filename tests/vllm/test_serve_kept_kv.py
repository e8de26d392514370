"""A real vLLM that keeps its KV cache while it sleeps, behind a real `cumem-sleep serve`, beside another model.

Its worker looks at every place of the KV cache that a request reads (`HashingWorker`).
"""

from __future__ import annotations

import importlib.metadata
import pathlib
from collections.abc import Iterator

import pytest
import watched_server
from environment import skip_unless_vllm
from ready_process import ReadyProcess
from test_serve_without_layer import Front

from cumem_sleep.vllm import kept_kv

skip_unless_vllm()
if importlib.metadata.version("vllm").rpartition(".")[0] not in kept_kv.VERSIONS:
    pytest.skip("this version resets its prefix cache", allow_module_level=True)
pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = list(range(7, 107))  # six blocks of 16 and a part of one
BLOCK_BYTES = 2 * 32 << 10


@pytest.fixture
def front(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> Iterator[Front]:
    options = [*watched_server.options("recording_hashing_worker.RecordingHashingWorker"), "--block-size", "16"]
    options += ["--num-gpu-blocks-override", "61"]  # not a power of two: no other size of a tensor is a multiple
    environment = {"VLLM_PLUGINS": "simulated_cuda,cumem_sleep", "CUMEM_SLEEP_KEEP_KV_BYTES": "1GiB"}
    front = Front(ready_process, tmp_path, "token", *options, "--enable-prompt-tokens-details", **environment)
    yield front
    front.process.kill()  # its servers end with it
    front.process.wait()
    front.vllm.end()


def ask(front: Front) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were found in the prefix cache."""
    answer = front.ask("/v1/completions", {"model": "stock", "prompt": PROMPT, "max_tokens": 3, "temperature": 0})
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def kept_bytes(front: Front) -> int:
    return int(front.status()["stock"]["kept_bytes"])


def test_a_prefix_survives_a_switch_until_the_host_lacks_memory(front: Front) -> None:
    front.until(lambda: front.status()["stock"]["phase"] == "awake")
    said, cached = ask(front)
    assert cached == 0
    for _ in range(2):
        assert "This is other," in front.complete("other")
        front.until(lambda: kept_bytes(front) >= 6 * BLOCK_BYTES)
        stock = front.status()["stock"]
        assert (stock["phase"], stock["level"], stock["error"]) == ("asleep", 1, None), front.said()
        assert ask(front) == (said, 96), front.said()
        assert kept_bytes(front) == 0, "it is on the GPU again"
    assert "This is other," in front.complete("other")
    front.until(lambda: kept_bytes(front) >= 6 * BLOCK_BYTES)
    front.lack_host_memory(level=1)
    front.until(lambda: not kept_bytes(front))
    assert front.status()["stock"]["phase"] == "asleep"
    assert ask(front) == (said, 0), "it is computed again"
    front.end()
    log = front.log.read_text()
    assert "stock: gives up the KV cache that it keeps: sleepers hold all of `host_memory`" in log
    assert " failed " not in log
    assert "did not give up" not in log
    assert not front.touches.exists(), front.touches.read_text()
    assert not front.asked_asleep.exists(), front.asked_asleep.read_text()
