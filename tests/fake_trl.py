"""TRL, vLLM and what they need, as far as `benchmarks/trl_colocated.py` uses them, with a GPU that is not there.

The module stands for all of these packages at once: `sitecustomize` puts it in their places. It notes what the engine
is asked, in the file that $FAKE_TRL_CALLS names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import types
from typing import Any

PACKAGES = ["datasets", "trl", "trl.generation", "trl.generation.vllm_generation", "vllm", "transformers", "tokenizers"]


def install() -> None:
    """In all processes; PyTorch only where a way runs."""
    here = sys.modules[__name__]
    for name in [*PACKAGES, *(["torch"] if "--one" in sys.orig_argv else [])]:
        sys.modules[name] = here
    importlib.metadata.version = lambda name: f"fake {name}"


def _anything(*_: Any, **__: Any) -> Any:
    return types.SimpleNamespace(save_pretrained=_anything, WordLevel=_anything, Whitespace=_anything)


Tokenizer = PreTrainedTokenizerFast = _anything
models = pre_tokenizers = _anything()
AutoTokenizer = types.SimpleNamespace(from_pretrained=_anything)
Dataset = types.SimpleNamespace(from_list=list)
GRPOConfig = types.SimpleNamespace
TrainerCallback = PrinterCallback = object
cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: None, mem_get_info=lambda: (1, 3))


class LLM:
    def __init__(self, **asked: Any) -> None:
        assert asked["enable_sleep_mode"]
        assert asked["enforce_eager"]

    def _note(self, *call: Any) -> None:
        with open(os.environ["FAKE_TRL_CALLS"], "a") as file:
            file.write(json.dumps([sys.argv[-1], os.environ.get("CUMEM_SLEEP_DISABLE"), *call]) + "\n")

    def sleep(self, level: int = 1) -> None:
        self._note("sleep", level)

    def wake_up(self, tags: list[str]) -> None:
        self._note("wake", *tags)

    def generate(self) -> None:
        time.sleep(0.002)


class VLLMGeneration:
    def __init__(self) -> None:
        self.llm = globals()["LLM"](enable_sleep_mode=True)
        self.llm.sleep(level=2)

    def sync_weights(self) -> None:
        self.llm.wake_up(tags=["weights"])
        time.sleep(0.001)


vllm_generation = sys.modules[__name__]


class GRPOTrainer:
    """Whose reward rises from step to step, but for the way in $FAKE_TRL_STAYS; that in $FAKE_TRL_FAILS raises."""

    def __init__(self, _model: str, _reward: Any, config: Any, _data: Any, *, callbacks: list[Any], **_: Any) -> None:
        self._steps, self._callbacks, self._generation = config.max_steps, callbacks, VLLMGeneration()

    def remove_callback(self, _: Any) -> None: ...

    def train(self) -> None:
        way = sys.argv[-1]
        for step in range(self._steps):
            self._tell("on_step_begin")
            self._generation.sync_weights()
            self._generation.llm.wake_up(tags=["kv_cache"])
            self._generation.llm.generate()
            self._generation.llm.sleep(level=2)
            self._tell("on_step_end")
            self._tell("on_log", logs={"reward": 0.5 if way == os.environ.get("FAKE_TRL_STAYS") else step / 20})
            if step == 3 and way == os.environ.get("FAKE_TRL_FAILS"):
                raise RuntimeError("the engine is gone")

    def _tell(self, name: str, **more: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, name, _anything)(None, None, None, **more)
