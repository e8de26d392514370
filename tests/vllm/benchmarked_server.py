"""`vllm serve` as `benchmarks/vllm_level_3.py` starts it, without a GPU: python benchmarked_server.py FOLDER …

All is real (`test_serve_level_3.py` says what), but the model: whatever FOLDER says, it is the one of the tests.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from types import SimpleNamespace


def main() -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import watched_server

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for each in ("platform", "model"):
            (folder / each).mkdir()
        watched_server.prepare_process(folder / "platform")
        from vllm.entrypoints.cli.serve import ServeSubcommand

        model = watched_server.model_folder(folder / "model")
        line = ["--worker-cls", "benchmarked_server.Worker", *sys.argv[2:], "--max-model-len", "512"]
        arguments = watched_server.arguments(model, *line)
        arguments.model_tag = None
        ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
else:
    import torch
    from deep_worker_process import DeepWorker

    from cumem_sleep import CuMemAllocator, Settings

    class Worker(DeepWorker):
        """`DeepWorker`, with the settings of the environment, and a model for `worker_extension.Extension`."""

        def init_device(self) -> None:
            super().init_device()
            self._allocator = CuMemAllocator.instance = CuMemAllocator(Settings.from_environment())
            self.model_runner = SimpleNamespace(model=torch.nn.Module())
            torch.cuda.synchronize = lambda: None
