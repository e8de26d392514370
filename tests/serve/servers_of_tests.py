"""Fleets over simulated servers: real processes, real HTTP."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from cumem_sleep.serve.config import Config, parse
from cumem_sleep.serve.fleet import Fleet
from cumem_sleep.serve.front import Front
from cumem_sleep.serve.listener import Listener
from cumem_sleep.serve.status import FleetStatus, Phase

SIMULATED = f"{sys.executable} -m cumem_sleep.serve.simulated_server"
FAULTY = f"{sys.executable} {Path(__file__).parent / 'faulty_server.py'}"


def command(name: str, *options: str, server: str = SIMULATED) -> str:
    return " ".join([server, "--uds {socket} --served-model-name", name, *options])


def config(folder: Path, **models: dict[str, Any]) -> Config:
    """With a command each, where none is given; none asks this machine how much memory its GPUs have."""
    common = {"engine": "vllm", "idle": "never", "host_memory": "1GiB"}
    whole = {
        name: {**common, **({} if "url" in model else {"command": command(name)}), **model}
        for name, model in models.items()
    }
    return parse(json.dumps({"logs": str(folder / "logs"), "host_memory": "100GiB", "models": whole}))


@contextlib.asynccontextmanager
async def running(config: Config, **options: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(config, **options)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@contextlib.asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """Of a front before a fleet."""
    front = Front(fleet)
    listener = Listener(front, "127.0.0.1", 0)
    await listener.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", timeout=60) as client:
        yield client
    await listener.stop()
    await front.close()


def phases(status: FleetStatus) -> dict[str, Phase]:
    return {model.name: model.phase for model in status.models}


async def until(fleet: Fleet, **wanted: Phase) -> FleetStatus:
    """Wait until models are in these phases."""
    async for status in fleet.watch():
        if {name: phases(status)[name] for name in wanted} == wanted:
            return status
    raise AssertionError("the fleet has ended")
