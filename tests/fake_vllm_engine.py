"""As much of vLLM as `benchmarks/vllm_kept_kv.py` calls: one prefix, weights that are a number, and a cache of them.

Goes by the name `vllm` in that benchmark's processes. `FAKE_VLLM_WRONG` says what it does wrong.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WRONG = os.environ.get("FAKE_VLLM_WRONG", "")
KEPT_BYTES = int(os.environ.get("CUMEM_SLEEP_KEEP_KV_BYTES", "0"))
RANKS = 2
BLOCK = 16


class SamplingParams:
    """How many tokens are wanted."""

    def __init__(self, max_tokens: int, **_: Any) -> None:
        self.max_tokens = max_tokens


class LLM:
    """Answers by its weights and by what it finds in its cache."""

    def __init__(self, **options: Any) -> None:
        assert options["enable_sleep_mode"]
        assert options["enable_prefix_caching"]
        self._weights, self._weights_asleep = 0, 0
        self._cached: dict[tuple[int, ...], tuple[int, int]] = {}  # by the prompt: the weights, and places exchanged
        self._keeps = True

    def generate(self, prompts: list[dict[str, list[int]]], sampling: SamplingParams, use_tqdm: bool) -> list[Any]:
        """The answer to one prompt, whose log probabilities tell of the cache, too."""
        assert not use_tqdm
        (prompt,) = (tuple(each["prompt_token_ids"]) for each in prompts)
        found = (len(prompt) - 1) // BLOCK * BLOCK if prompt in self._cached else 0
        weights, exchanged = self._cached.setdefault(prompt, (self._weights, 0))
        read = 0 if WRONG == "deaf" else weights * 100 + exchanged
        tokens = [self._weights * 1000 + read + place for place in range(sampling.max_tokens)]
        chances = [{token: SimpleNamespace(logprob=-token / 7)} for token in tokens]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=chances)], num_cached_tokens=found)]

    def reset_prefix_cache(self) -> None:
        """Forget all."""
        self._cached.clear()

    def sleep(self, level: int) -> None:
        """Keep the cache if that is set, and not refused for this sleep."""
        assert level == 1
        self._weights_asleep = self._weights
        if not (KEPT_BYTES and self._keeps):
            self._cached.clear()
        self._keeps = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """All, or a tag: with the cache the weights are compared."""
        if WRONG == "exchanged":
            self._cached = {prompt: (weights, 1) for prompt, (weights, _) in self._cached.items()}
        if tags != ["weights"] and self._weights != self._weights_asleep and WRONG != "no digests":
            self._cached.clear()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the benchmark's extension of a worker does, and the plugin."""
        if method == "fill_with_telling_values":
            self._weights = args[0]
        elif method == "fill_unseen":
            when, seed = args
            Path(f"{when}.0").touch()
            threading.Thread(target=self._write_when, args=(Path(when), seed), daemon=True).start()
        elif method == "exchange_kv_blocks":
            self._cached = {prompt: (weights, 1) for prompt, (weights, _) in self._cached.items()}
        elif method == "cumem_sleep_keep_kv":
            (self._keeps,) = args
        else:
            assert method == "cumem_sleep_status"
            return [{"usage": {"kv_cache": {"kept_bytes": KEPT_BYTES // RANKS}}}] * RANKS
        return [1] * RANKS

    def _write_when(self, when: Path, seed: int) -> None:
        while not when.exists():
            time.sleep(0.001)
        self._weights = seed
        Path(f"{when}.0").unlink()
