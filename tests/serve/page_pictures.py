"""Makes the pictures of the page for the docs: python tests/serve/page_pictures.py docs."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from chromium import a_page
from front_world import ASLEEP, StubFleet, World, a_world

from cumem_sleep.serve.status import FleetStatus, GpuStatus, Holder, HostStatus, ModelStatus, Phase, Switch

GIB = 1 << 30
AT = 1_800_000_000.0
TOKEN = "token"
ASLEEP_1 = {"level": 1, "host_bytes": 16 * GIB}
WAITED_FOR = {"waiting": 3, "oldest_wait_s": 0.21}


def model(name: str, gpus: tuple[int, ...], phase: Phase, switch: Switch, **more: object) -> ModelStatus:
    common = {"name": name, "gpus": gpus, "phase": phase, "last_switch": switch, "level": None, "host_bytes": 0}
    return replace(ASLEEP, **{**common, **more})  # type: ignore[arg-type]


def status(_: StubFleet) -> FleetStatus:
    """A moment of some work: one model is being evicted for another."""
    models = (
        model("qwen-14b", (0,), Phase.FALLING_ASLEEP, Switch("wake", 1, 0.31, AT - 340), aliases=("gpt-4o-mini",)),
        model("qwen-8b", (0,), Phase.ASLEEP, Switch("sleep", 1, 0.19, AT - 341), **ASLEEP_1, **WAITED_FOR),
        model("coder-32b", (0, 1), Phase.ASLEEP, Switch("sleep", 1, 0.62, AT - 4000), level=1, host_bytes=61 * GIB),
        model("vision", (1,), Phase.AWAKE, Switch("wake", 1, 0.27, AT - 65), running=4),
        model("embedder", (1,), Phase.STOPPED, Switch("stop", None, 1.4, AT - 9000)),
    )
    first = (Holder("qwen-14b", 0.9, Phase.FALLING_ASLEEP),)
    gpus = (
        GpuStatus(0, "simulated GPU", 80 * GIB, 74 * GIB, first),
        GpuStatus(1, "simulated GPU", 80 * GIB, 41 * GIB, (Holder("vision", 0.5, Phase.AWAKE),)),
    )
    return FleetStatus(AT, "0.1.0", True, gpus, models, HostStatus(128 * GIB, 77 * GIB, 96 * GIB))


async def shoot(world: World, folder: Path) -> None:
    sizes = {"serve-page.png": (900, 900, "light", 1.0), "serve-page-phone.png": (390, 844, "dark", 1.0)}
    for name, (width, height, scheme, scale) in sizes.items():
        async with a_page() as page:
            await page.looks(width, height, scheme, scale)
            await page.go(f"http://127.0.0.1:{world.port}/")
            await page.until("document.querySelector('#link').className === 'link live'")
            if scheme == "light":
                await page.value(f"use('{TOKEN}')")
                await page.until("last && last.operator")
            await page.picture(folder / name)


async def main() -> None:
    StubFleet.status = status  # type: ignore[method-assign]
    names = ("qwen-14b", "qwen-8b", "coder-32b", "vision", "embedder")
    async with a_world(*names, admin_token=TOKEN) as world:
        await shoot(world, Path(sys.argv[1]))


if __name__ == "__main__":
    asyncio.run(main())
