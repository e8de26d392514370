"""What servers say for Prometheus, through the front: one page as it is, and all of them as one."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter as Counts
from operator import ne
from pathlib import Path

import pytest
import yaml
from engine_metrics import an_engine
from front_world import Asked, Handler, a_world, get
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servers_of_tests import client_of, config, running, until

from cumem_sleep.serve.engines import engine as engines
from cumem_sleep.serve.engines.engine import Failed
from cumem_sleep.serve.engines.vllm import VllmEngine
from cumem_sleep.serve.fleet import ServerFailed
from cumem_sleep.serve.server_metrics import joined
from cumem_sleep.serve.status import Phase

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UP = "cumem_sleep_serve_engine_up"
TAKEN = re.compile("^((?:exported_)*model)$")
Found = Counts[tuple[str, str, frozenset[tuple[str, str]], str, object]]


def read(page: str, model: str = "") -> Found:
    """Samples with their metric's type, as prometheus_client reads them, and with a label more."""
    more = {"model": model} if model else {}
    found: Found = Counts()
    for family in text_string_to_metric_families(page):
        for name, labels, value, time, *_ in family.samples:
            renamed = {TAKEN.sub(r"exported_\1", key) if model else key: said for key, said in labels.items()}
            found[name, family.type, frozenset({**renamed, **more}.items()), str(value), time] += 1
    return found


def by_model(page: str, metric: str) -> dict[str, float]:
    return {dict(labels)["model"]: float(value) for name, _, labels, value, _ in read(page) if name == metric}


def a_page(value: float, *names: str) -> str:
    registry = CollectorRegistry()
    odd = 'a "b"} 1 \\n\\ \n\u2028\x0b{,model="x",'
    Gauge("odd", odd, ["said", "model", "exported_model"], registry=registry).labels(odd, "mine", "theirs").set(value)
    Histogram("seconds", "Took.", ["le_", "engine"], registry=registry).labels(odd, "0").observe(value)
    Summary("size", "Bytes.", registry=registry).observe(value)
    for name in names:
        Counter(name, f"Of {name}.", registry=registry).inc(value)
    return generate_latest(registry).decode()


def test_pages_are_one_as_prometheus_client_reads_them() -> None:
    plain = 'bare 1\n\n# a word\nspaced \t{ a = "x" , b="" , }  -1.5e-3 \t 17000000 \nempty{} +Inf\nnan NaN\n'
    pages = {"org/one": a_page(2.5, "both"), 'two"\n': a_page(float("inf"), "both", "one_alone"), "three": plain}
    whole = joined(pages)
    up = "".join(f'{UP}{{model="{name}"}} 1\n' for name in ("org/one", 'two\\"\\n', "three"))
    wanted = sum((read(page, model) for model, page in pages.items()), read(f"# TYPE {UP} gauge\n{up}"))
    assert read(whole) == wanted
    names = re.findall("^(\\w+)", whole, re.MULTILINE)
    assert sum(map(ne, names, names[1:])) + 1 == len(set(names)), "lines with one name stand together"
    types = re.findall("^# TYPE (\\S+)", whole, re.MULTILINE)
    assert len(types) == len(set(types)), "a metric stands twice"


@pytest.mark.parametrize(
    "line",
    [
        *("1 2", "a", "a b", "a 1 x", 'a{b="c} 1', "a{b=c} 1", 'a{b="c"d="e"} 1', 'a{"b"} 1', "a{b} 1", "a 1_0"),
        *("<html>", "a\u0663 1", "a \u0663", "a 1e", "{} 1", 'a{b="c"', "a{" + 'b="c",' * 9999, "a" + " " * 99999),
        "a " + "1" * 99999 + "!",
    ],
)
def test_a_page_that_is_none_costs_no_other(line: str) -> None:
    whole = joined({"bad": f"x 1\n{line}\n", "good": "x 2\n", "gone": ServerFailed("it\nis stopped", 1)})
    assert by_model(whole, UP) == {"bad": 0, "good": 1, "gone": 0}
    assert by_model(whole, "x") == {"good": 2}
    assert re.findall("^# '(\\w+)': .{10,600}$", whole, re.MULTILINE) == ["bad", "gone"], (
        "it says what is missing, and why"
    )


def asked_for(*, panels: bool) -> dict[str, set[str]]:
    """What alerts about engines ask for, and the dashboard's panels: metrics with their labels."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "cumem-sleep.rules.yml").read_text())["groups"][0]["rules"]
    asked = [rule["expr"] for rule in rules if rule.get("alert", "")[10:] in ("RanksDisagree", "EngineDisagrees")]
    assert len(asked) == 2
    if panels:
        shown = json.loads((DEPLOY / "grafana" / "cumem-sleep.json").read_text())["panels"]
        of_engines = shown[[panel["title"] for panel in shown].index("Engines") + 1 :]
        asked += [target["expr"] for panel in of_engines for target in panel["targets"]]
        assert len(asked) >= 8
    found: dict[str, set[str]] = {}
    for name, selector in re.findall(r"((?:cumem_sleep_|vllm:)\w+)(?:\{([^}]*)\})?", " ".join(asked)):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=", selector))
    return found


async def test_servers_are_asked_awake_and_asleep_and_none_is_woken(tmp_path: Path) -> None:
    models = {"org/one": {"at_start": "awake"}, "two": {"gpus": [1]}, "three": {"at_start": "stopped"}}
    async with running(config(tmp_path, **models)) as fleet, client_of(fleet) as client:
        before = await until(fleet, **{"org/one": Phase.AWAKE, "two": Phase.ASLEEP, "three": Phase.STOPPED})
        own = await client.get("/models/two/metrics")
        assert own.status_code == 200, own.text
        assert own.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "model=" not in own.text
        whole = (await client.get("/models/metrics")).raise_for_status()
        assert by_model(whole.text, "cumem_sleep_sleep_level") == {"org/one": 0, "two": 1}
        assert by_model(whole.text, UP) == {"org/one": 1, "two": 1, "three": 0}
        for name in ("three", "four"):
            assert (await client.get(f"/models/{name}/metrics")).status_code == {"three": 503, "four": 404}[name]
        now = fleet.status().models
        assert [(model.phase, model.pid) for model in now] == [(model.phase, model.pid) for model in before.models]
        assert fleet.counters.requests == {}


async def test_alerts_and_panels_about_engines_find_their_metrics_there(tmp_path: Path) -> None:
    async with running(config(tmp_path, one={})) as fleet, client_of(fleet) as client:
        await until(fleet, one=Phase.ASLEEP)
        simulated = (await client.get("/models/metrics")).text
    of_vllm = joined({"one": generate_latest(an_engine()).decode()})
    for page, asked in ((simulated, asked_for(panels=False)), (of_vllm, asked_for(panels=True))):
        there = {name: {label for label, _ in labels} for name, _, labels, _, _ in read(page)}
        for name, labels in asked.items():
            assert labels - {"instance"} <= there[name], name


class Refuses:
    """A server's answers that are no page."""

    @staticmethod
    async def too_late(asked: Asked) -> None:
        await asked.gone()

    @staticmethod
    async def too_long(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"a 1\n" * 1000)
        asked.writer.close()

    @staticmethod
    async def none(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    @staticmethod
    async def not_text(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\xff")


@pytest.mark.parametrize("handler", [Refuses.too_late, Refuses.too_long, Refuses.none, Refuses.not_text])
async def test_a_server_that_gives_no_page_is_given_up(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "METRICS_WITHIN_S", 0.2)
    monkeypatch.setattr(engines, "MOST_METRICS_BYTES", 3999)
    async with a_world("one") as world:
        server = await world.server("one", handler)
        engine = VllmEngine(world.fleet.servers["one"], 600.0)
        with pytest.raises(Failed) as failed:
            await asyncio.wait_for(engine.metrics(), 60.0)
        await engine.close()
    assert str(failed.value).startswith("/metrics: ")
    assert str(server.port) not in str(failed.value), "clients may see this"


@pytest.mark.parametrize(("path", "name"), [("/models/metrics", UP), ("/models/one/metrics", "own")])
async def test_both_need_the_key_of_the_fronts_own(path: str, name: str) -> None:
    async with a_world("one", api_keys=["key"]) as world:
        for lines, code in (((), 401), (("Authorization: Bearer key",), 200)):
            answer = await world.ask(get(path, *lines))
            assert (answer.code, name in answer.body.decode()) == (code, code == 200)
        assert (await world.ask(get(path, "Authorization: Bearer key", method="POST"))).code == 405
