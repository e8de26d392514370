"""A headless Chromium, told what to do over a pipe (its DevTools protocol): no driver and no library is needed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-default-browser-check"),
    *(
        "--disable-dev-shm-usage",
        "--force-color-profile=srgb",
        "--proxy-server=127.0.0.1:9",
        "--proxy-bypass-list=127.0.0.1",
    ),
)
# Chromium reads from descriptor 3 and writes to 4.
LAUNCHER = """
import os, sys
pipes = [os.dup(int(each)) for each in sys.argv[1:3]]
for pipe, number in zip([os.dup(pipe) for pipe in pipes], (3, 4)):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
WITHIN_S = 120.0


class Page:
    """One tab.

    Attributes:
        complaints: what its console and its rules of security said.
        requests: URLs that it asked for.
    """

    def __init__(self, reader: asyncio.StreamReader, to: int) -> None:
        self._reader, self._to = reader, to
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def begin(self) -> None:
        self._reading = asyncio.create_task(self._read())
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(self._answers[number], WITHIN_S)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Of an expression; promises are waited for."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Until an expression is true."""
        deadline = asyncio.get_running_loop().time() + WITHIN_S
        while not await self.value(f"document.readyState === 'complete' && Boolean({script})"):
            assert asyncio.get_running_loop().time() < deadline, f"it never came about: {script}"
            await asyncio.sleep(0.03)

    async def looks(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the window, and whether its user likes it light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": "\r" if key == "Enter" else ""}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **common)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            elif message["method"] == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
            elif message["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(message["params"])[:500])
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])


@contextlib.asynccontextmanager
async def a_page() -> AsyncIterator[Page]:
    """A tab of a fresh Chromium, which ends with the block."""
    assert PROGRAM is not None
    from_us, to_them = os.pipe()
    from_them, to_us = os.pipe()
    sandbox = () if os.geteuid() else ("--no-sandbox",)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = (PROGRAM, *OPTIONS, *sandbox, f"--user-data-dir={folder}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LAUNCHER, str(from_us), str(to_us), *command),
            pass_fds=(from_us, to_us),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        reader = asyncio.StreamReader(limit=64 << 20)
        loop = asyncio.get_running_loop()
        with open(from_them, "rb", buffering=0) as pipe:
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            page = Page(reader, to_them)
            try:
                await page.begin()
                yield page
            finally:
                page._reading.cancel()
                os.close(to_them)  # it ends with its pipe
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except asyncio.TimeoutError:
                    process.kill()
                    await process.wait()
