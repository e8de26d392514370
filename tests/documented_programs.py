"""What snippets of the docs call, and what a test cannot have: `python documented_programs.py vllm serve …`, or `pip`.

They refuse what they do not know. That vLLM itself takes the options is tested where it is installed
(`tests/vllm/documented_commands.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GPU = Path("gpu")  # in the folder of the snippet: exists while somebody is awake on the GPU


def pip(arguments: list[str]) -> None:
    """`pip install` of this project, with extras that it has. Nothing is installed."""
    assert arguments.pop(0) == "install"
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    (name,) = re.findall(r'^\[project\]\nname = "(.+)"', project, re.MULTILINE)
    for requirement in arguments:
        asked = re.fullmatch(rf"(?:\.|{name})(?:\[([\w,]+)\])?", requirement)
        if asked is None or not set((asked[1] or extras[0]).split(",")) <= set(extras):
            raise SystemExit(f"pip: {requirement!r}: there are {name} and ., with the extras {', '.join(extras)}")


def vllm(arguments: list[str]) -> None:
    """`vllm serve` without a model: with a middleware, the app and the engine of the gate's tests behind it."""
    assert arguments.pop(0) == "serve"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--enable-sleep-mode", action="store_true", required=True)
    parser.add_argument("--middleware")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it once more at its end
    where = ["--uds", asked.uds] if asked.uds else ["--host", asked.host, "--port", str(asked.port)]
    from cumem_sleep import Settings

    Settings.from_environment()  # what is wrong in it stops a server
    if asked.middleware is None:
        from cumem_sleep.serve.simulated_server import SimulatedServer, arguments, serve

        names = asked.served_model_name or [asked.model]
        serve(SimulatedServer(arguments().parse_args([*where, "--served-model-name", *names])))
    else:
        serve_behind(asked.middleware, asked.host, asked.port, asked.uds)


def serve_behind(middleware: str, host: str, port: int, uds: str | None) -> None:
    """Serve until SIGTERM."""
    import uvicorn

    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from fake_vllm import FakeEngine, FakeVllm

    class Engine(FakeEngine):
        """One of those that share a GPU on which one fits. It fails if another one is awake."""

        def __init__(self) -> None:
            super().__init__()
            GPU.touch(exist_ok=False)

        def _sleep(self, level: int) -> None:
            super()._sleep(level)
            GPU.unlink()

        async def wake_up(self, tags: list[str] | None = None) -> bool:
            if "weights" in self.asleep and (tags is None or "weights" in tags):
                GPU.touch(exist_ok=False)
            return await super().wake_up(tags)

    module, _, name = middleware.rpartition(".")
    app = FakeVllm(Engine(), dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
    gate = getattr(importlib.import_module(module), name)(app)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await gate({**scope, "app": app}, receive, send)

    config = uvicorn.Config(asgi, host, port, uds=uds, lifespan="off", log_level="warning")
    try:
        asyncio.run(uvicorn.Server(config).serve())
    finally:
        if not app.engine.asleep:
            GPU.unlink()


if __name__ == "__main__":
    {"pip": pip, "vllm": vllm}[sys.argv[1]](sys.argv[2:])
