"""`cumem-sleep serve --demo`: three simulated models that share one simulated GPU."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from pathlib import Path

from .config import Config, parse

_SECONDS = {"qwen-14b": (0.6, 0.25, 0.45), "qwen-8b": (0.5, 0.15, 0.25), "embedder": (0.3, 0.05, 0.1)}
_GIB = {"qwen-14b": 28, "qwen-8b": 16, "embedder": 2}


def config(folder: Path) -> Config:
    """Its models, with logs in this folder, and an admin token of its own."""
    models: dict[str, dict[str, object]] = {
        name: {
            "engine": "vllm",
            "command": _command(name),
            "host_memory": f"{_GIB[name]}GiB",
            "idle": {1: "30s", 2: "10m"},
        }
        for name in _SECONDS
    }
    models["qwen-14b"] |= {"aliases": ["gpt-4o-mini"], "share": 0.9, "at_start": "awake"}
    models["qwen-8b"] |= {"share": 0.9}
    models["embedder"] |= {"share": 0.1}
    front = {"admin_token": secrets.token_urlsafe(12)}
    whole = {"front": front, "logs": str(folder), "host_memory": "64GiB", "models": models}
    return parse(json.dumps(whole), "the demo's models.yaml")


def _command(name: str) -> str:
    start_s, sleep_s, wake_s = _SECONDS[name]
    layer = f"--weights-bytes={_GIB[name] << 30}"  # simulated, too
    server = [sys.executable, "-m", "cumem_sleep.serve.simulated_server", "--uds", "{socket}"]
    times = {"start": start_s, "sleep": sleep_s, "wake": wake_s, "token": 0.03}
    options = [f"--{which}-seconds={seconds}" for which, seconds in times.items()]
    return shlex.join([*server, "--served-model-name", name, "gpt-4o-mini", layer, *options])


def invitation(port: int, token: str) -> list[str]:
    """What to try, line by line."""
    url = f"http://127.0.0.1:{port}"
    ask = '{{"model": "{}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}'
    return [
        "three simulated models share one simulated GPU; no real one is used",
        f"the page:   {url}/#token={token}   (with the admin token)",
        f"a request:  curl {url}/v1/chat/completions -d {shlex.quote(ask.format('qwen-14b'))}",
        f"a switch:   curl {url}/v1/chat/completions -d {shlex.quote(ask.format('qwen-8b'))}",
        f"the models: cumem-sleep status --url {url}",
    ]
