"""The page at `/` in a real browser: what it shows, that it follows, what its buttons do, and how it reads."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, Page, a_page
from front_world import World, a_world, get

import cumem_sleep.serve.page as served
from cumem_sleep.serve.cluster import ClusterStatus, NodeStatus
from cumem_sleep.serve.fleet import OrderRefused
from cumem_sleep.serve.status import HostStatus, Phase, VaultStatus

STATIC = Path(served.__file__).parent / "static"
TOKEN = "operator's-token"
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
pytestmark = pytest.mark.slow


async def opened(world: World, page: Page) -> None:
    await page.looks(1000, 800)
    await page.go(f"http://127.0.0.1:{world.port}/")
    await page.until("document.querySelector('#link').className === 'link live'")


async def enter(page: Page, token: str) -> None:
    """With the keyboard alone."""
    await page.until("document.querySelector('#ask').open")
    await page.value("document.querySelector('#token').select()")
    await page.type(token)
    await page.press("Enter", 13)


def tell(world: World, phase: Phase) -> None:
    world.fleet.phase = phase
    world.fleet.changed.set()


@needs_browser
async def test_it_shows_who_is_awake_and_follows() -> None:
    async with a_world("one", "two") as world, a_page() as page:
        await opened(world, page)
        text = await page.value("document.body.innerText")
        for wanted in (
            "GPU 0",
            "H200",
            "40 B of 100 B in use",
            "one",
            "two",
            "asleep, level 1",
            "fell asleep at level 1 in 250 ms",
        ):
            assert wanted in text, text
        assert await page.value("document.querySelectorAll('[data-call]').length") == 0, "nobody is an operator"
        label = "document.querySelector('#gpus [role=img]').getAttribute('aria-label')"
        assert await page.value(label) == "GPU 0: one 90 percent, awake"
        bar, part = [await page.value(f"document.querySelector('#gpus .bar{at}').offsetWidth") for at in ("", " span")]
        assert abs(part / bar - 0.9) < 0.02
        tell(world, Phase.WAKING)
        await page.until("document.querySelector('.state').textContent === 'waking'")
        tell(world, Phase.AWAKE)
        await page.until("document.querySelector('#news').textContent === 'one is awake, two is awake'")
        assert page.complaints == []
        hosts = {re.match(r"\w+://([^/]*)", url)[1] for url in page.requests}  # type: ignore[index]
        assert hosts == {f"127.0.0.1:{world.port}"}, "it works offline"


@needs_browser
async def test_a_vault_has_a_bar_of_its_own() -> None:
    """Two sleepers share most of what lies there: their parts are as long as what is asleep."""
    async with a_world("one", "two", "beside") as world, a_page() as page:
        status = world.fleet.status()
        one, two, beside = (replace(model, host_bytes=5) for model in status.models)
        in_vault = (replace(one, in_vault=True, kept_bytes=7), replace(two, in_vault=True))
        models = (*in_vault, replace(beside, kept_bytes=3))
        host = HostStatus(10, 5, None, VaultStatus(20, 0, 6, 14), kept_bytes=3)
        world.fleet.status = lambda: replace(status, models=models, host=host)  # type: ignore[method-assign]
        await opened(world, page)
        bars = "[...document.querySelectorAll('#gpus [role=img]')].slice(1)"
        assert await page.value(f"{bars}.map((bar) => bar.getAttribute('aria-label'))") == [
            "Host memory: 5 B of 10 B held by sleepers, 3 B of KV cache kept",
            "Vault: 6 B of 20 B held by sleepers",
        ]
        parts = f"{bars}.map((bar) => [...bar.children].map((part) => [part.title, part.style.width]))"
        assert await page.value(parts) == [[["beside", "80%"]], [["one", "15%"], ["two", "15%"]]]
        text = await page.value("document.body.innerText")
        assert "14 B left" in text
        assert [line for line in text.splitlines() if "keeps" in line] == [
            "keeps 7 B of KV cache",
            "keeps 3 B of KV cache",
        ]
        assert page.complaints == []


@needs_browser
async def test_the_nodes_of_a_cluster_say_whether_they_answer_and_what_is_up_there() -> None:
    async with a_world("one", "two") as world, a_page() as page:
        await opened(world, page)
        assert await page.value("document.querySelector('#cluster').hidden"), "one host is no cluster"
        status = world.fleet.status()
        one, two = status.models
        up = replace(status, models=(replace(one, phase=Phase.AWAKE, running=3), replace(two, phase=Phase.STOPPED)))
        said = {"10.0.0.1": up, "10.0.0.2": replace(status, draining=True), "10.0.0.3": None}
        nodes = tuple(NodeStatus(name, each) for name, each in said.items())
        facts = {each.name: getattr(status, each.name) for each in fields(status)}
        cluster = ClusterStatus(**facts, nodes=nodes)
        world.fleet.status = lambda: cluster  # type: ignore[method-assign]
        world.fleet.changed.set()
        await page.until("!document.querySelector('#cluster').hidden")
        spans = "[...card.querySelectorAll('h3, span')].map((each) => each.textContent)"
        assert await page.value(f"[...document.querySelectorAll('#nodes li')].map((card) => {spans})") == [
            ["10.0.0.1", "up", "one awake, 3 running"],
            ["10.0.0.2", "draining", "one asleep, 0 running", "two asleep, 0 running"],
            ["10.0.0.3", "does not answer"],
        ]
        assert page.complaints == []


@needs_browser
async def test_buttons_are_for_those_with_the_token() -> None:
    async with a_world("one", "two", admin_token=TOKEN) as world, a_page() as page:
        await opened(world, page)
        await page.value("document.querySelector('#key').click()")
        await enter(page, TOKEN)
        await page.until("document.querySelectorAll('[data-call]').length === 6")
        states = "[...document.querySelectorAll('[data-model=two] button')].map((b) => [b.textContent, b.disabled])"
        assert await page.value(states) == [["Wake", False], ["Sleep", True], ["Stop", False]]
        await page.value("document.querySelector('[data-model=two] [data-call=wake]').focus()")
        await page.press("Enter", 13)
        await _until_called(world, ("wake", "two"))
        await page.value("document.querySelector('[data-model=two] [data-call=stop]').focus()")
        tell(world, Phase.AWAKE)
        await page.until("!document.querySelector('[data-model=two] [data-call=sleep]').disabled")
        focused = "document.activeElement.getAttribute('aria-label')"
        assert await page.value(focused) == "Stop two", "news take nobody's focus away"
        await page.go(f"http://127.0.0.1:{world.port}/")
        await page.until("document.querySelectorAll('[data-call]').length === 6")
        await page.value("document.querySelector('#key').click(), document.querySelector('#forget').click()")
        await page.until("document.querySelectorAll('[data-call]').length === 0 && last !== null && !last.operator")
        assert page.complaints == []


@needs_browser
async def test_a_link_brings_the_token_and_forgets_it() -> None:
    async with a_world("one", api_keys=["key"], admin_token=TOKEN) as world, a_page() as page:
        url = f"http://127.0.0.1:{world.port}/"
        await page.go(f"{url}#token=key")
        await page.until("document.querySelector('#link').className === 'link live'")
        assert await page.value("location.href") == url
        assert await page.value("document.querySelectorAll('[data-call]').length") == 0
        await page.go(f"{url}#token={TOKEN}")  # which loads nothing
        await page.until("document.querySelectorAll('[data-call]').length === 3")
        assert await page.value("location.href") == url
        assert page.complaints == []


@needs_browser
async def test_names_are_whole_and_a_gpu_of_nobody_says_so() -> None:
    names = tuple(f"{each}/a-name-that-is-much-longer-than-its-part-of-a-bar-{'x' * 40}" for each in ("one", "two"))

    async with a_world(*names) as world, a_page() as page:
        status = world.fleet.status()
        taken, free = status.gpus[0], replace(status.gpus[0], gpu=1, holders=())
        holders = tuple(replace(taken.holders[0], model=name, share=0.05) for name in names)
        gpus = (replace(taken, holders=holders), free)
        world.fleet.status = lambda: replace(status, gpus=gpus)  # type: ignore[method-assign]
        for width in (1000, 360):
            await page.looks(width, 800)
            await page.go(f"http://127.0.0.1:{world.port}/")
            await page.until("document.querySelector('#link').className === 'link live'")
            shown = "[...document.querySelectorAll('#gpus .names')].slice(0, 2).map((names) => names.innerText)"
            assert await page.value(shown) == ["\n".join(names), "nobody is awake"]
            is_cut = "(each) => each.scrollWidth > each.clientWidth"
            assert await page.value(f"[...document.querySelectorAll('.names span')].filter({is_cut}).length") == 0
            assert await page.value("document.documentElement.scrollWidth") <= width
        labels = "[...document.querySelectorAll('#gpus [role=img]')].map((bar) => bar.getAttribute('aria-label'))"
        assert (await page.value(labels))[1] == "GPU 1: nobody is awake"


@needs_browser
async def test_where_keys_are_needed_it_asks_for_one_and_says_what_fails() -> None:
    async with a_world("one", api_keys=["key"], admin_token=TOKEN) as world, a_page() as page:
        await page.looks(1000, 800)
        await page.go(f"http://127.0.0.1:{world.port}/")
        await page.until("document.querySelector('#link').textContent === 'a token is needed'")
        await enter(page, "wrong")
        await page.until("document.querySelector('#link').textContent === 'this token is not accepted'")
        assert await page.value("document.querySelectorAll('#models li').length") == 0
        await enter(page, TOKEN)
        await page.until("document.querySelectorAll('[data-call]').length === 3")
        world.fleet.refusal = OrderRefused("<b>somebody else</b> started it")
        await page.value("document.querySelector('[data-call=stop]').click()")
        await page.until("!document.querySelector('#problem').hidden")
        said = await page.value("document.querySelector('#problem').textContent")
        assert said == "stop one: <b>somebody else</b> started it"


@needs_browser
async def test_it_comes_back_when_the_front_does() -> None:
    async with a_world("one") as world, a_page() as page:
        await opened(world, page)
        world.fleet.ended = True
        world.fleet.changed.set()
        await page.until("document.querySelector('#link').className === 'link lost'")
        world.fleet.ended = False
        await page.until("document.querySelector('#link').className === 'link live'")


# Without a browser


async def test_its_files_need_nothing_else_and_its_headers_forbid_the_rest() -> None:
    async with a_world("one", api_keys=["key"]) as world:
        for path, (_, kind) in served._FILES.items():
            answer = await world.ask(get(path))
            assert (answer.code, answer.headers["content-type"]) == (200, kind)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            head = await world.client()
            await head.send(get(path, method="HEAD"))
            assert (await head.head()).code == 200
    for file in STATIC.iterdir():
        text = file.read_text()
        assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", text), file
        assert "innerHTML" not in text
        assert not re.search(r"\sstyle=|\son\w+=", text), "the policy would not let it"


async def _until_called(world: World, *calls: tuple[Any, ...]) -> None:
    while world.fleet.calls != [*calls]:
        await asyncio.sleep(0.01)


# The demo
