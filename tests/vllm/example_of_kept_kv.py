"""`examples/kept_conversation.py` with this vLLM, and a worker that looks at what is read of the KV cache."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import sys
from typing import Any

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "kept_conversation.py"


def main(folder: pathlib.Path) -> None:
    import vllm
    import watched_server

    options: dict[str, Any] = {"worker_cls": "recording_hashing_worker.RecordingHashingWorker", "block_size": 16}
    options |= {"num_gpu_blocks_override": 61, "distributed_executor_backend": "uni", "enforce_eager": True}
    options |= {"max_model_len": 512, "load_format": "dummy"}
    vllm.LLM = functools.partial(vllm.LLM, **options)
    specification = importlib.util.spec_from_file_location("kept_conversation", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    os.environ["WATCHED_WORKER_RECORD"] = str(folder / "touches.jsonl")
    example.main(str(watched_server.model_folder(folder / "model")))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
