"""vLLM's real API server over `WatchedWorker`, without a GPU, in this process; its engine core is in one of its own."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import json
import os
import pathlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

WORDS = ("<unk>", "<s>", "</s>", "good", "bad", "hello", "world")


def model_folder(folder: pathlib.Path, experts: int = 0) -> pathlib.Path:
    """A model that vLLM can configure: a tiny Llama or Mixtral without weights, with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*WORDS, *(f"word{number}" for number in range(128 - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(words),
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arguments(model: pathlib.Path, *more: str) -> Any:
    """Of a server of that model with `WatchedWorker`."""
    return parsed(["--model", str(model), "--served-model-name", "model", "--enable-sleep-mode", *options(), *more])


def options(worker: str = "watched_worker.WatchedWorker") -> list[str]:
    """On the command line of a server with `WatchedWorker`, or another worker."""
    line = [
        *("--worker-cls", worker, "--distributed-executor-backend", "uni", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-batched-tokens", "16384", "--max-num-seqs", "64"),
        *("--disable-log-stats", "--load-format", "dummy"),
    ]
    if importlib.metadata.version("vllm").startswith("0.18."):
        line.append("--no-async-scheduling")  # with it, requests kept over a sleep never end, with or without a gate
    return line


def parsed(line: list[str]) -> Any:
    """The command line of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    except ImportError:  # 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser()).parse_args(line)


@asynccontextmanager
async def engine(args: Any) -> AsyncIterator[Any]:
    """The engine client, as the API server makes it."""
    from vllm.entrypoints.openai.api_server import build_async_engine_client

    async with build_async_engine_client(args) as client:
        yield client


def sibling(client: Any) -> Any:
    """A client of the same engine, as another API server has one: it shares what it knows of requests, not itself."""
    twin = copy.copy(client)
    twin.__class__ = type("Sibling", (type(client),), {"__del__": lambda self: None})  # the engine is not its to end
    twin.engine_core = copy.copy(client.engine_core)
    return twin


async def make_app(args: Any, client: Any) -> Any:
    """The server's FastAPI app over it."""
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

    tasks = await client.get_supported_tasks()
    more = (client.model_config,) if "model_config" in inspect.signature(build_app).parameters else ()
    app = build_app(args, tasks, *more)
    await init_app_state(client, app.state, args, tasks)
    return app


def prepare_process(folder: pathlib.Path) -> None:
    """Environment of a machine with a simulated GPU, before vLLM is imported."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from environment import simulate_cuda

    simulate_cuda(folder)
    os.environ.update(
        VLLM_SERVER_DEV_MODE="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "CRITICAL"),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        CUMEM_SLEEP_DRIVER="sim",
        VLLM_WORKER_MULTIPROC_METHOD="fork",
        WATCHED_WORKER_RECORD=str(folder / "touches.jsonl"),
    )
