"""The paper on many hosts: what it simulates, and that its page says what came out."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import statistics
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cumem_sleep.serve.policy import STOP

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "examples" / "deploy" / "many-hosts.md"
RESULT: dict[str, Any] = json.loads(PAGE.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("many_hosts", ROOT / "benchmarks" / "many_hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["many_hosts"] = module
    spec.loader.exec_module(module)
    return module


def test_a_request_waits_for_drain_sleep_and_wake(paper: ModuleType) -> None:
    requests = [(0.0, "m0", 1.0), (0.5, "m1", 1.0)]
    assert paper.waits(requests, [0, 1], "sleep") == pytest.approx([0.352, 0.352])
    assert paper.waits(requests, [0, 0], "sleep") == pytest.approx([0.352, 0.852 + 0.063 + 0.352])
    assert paper.waits(requests, [0, 0], "restart") == pytest.approx([0.0, 0.5 + 24.2])
    assert paper.waits(requests, [0, 0], "restart", wait_s=10.0)[1] == float("inf")
    assert paper.waits(requests, [0, 1], "restart") == [0.0, 0.0], "with a GPU each nothing ever stops"
    assert paper.WAYS == {"sleep": (1,), "restart": (STOP,)}


def test_switches_take_what_was_measured(paper: ModuleType) -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "serve_models.json").read_text())
    switches = measured["one after the other"]["switches"]
    for name, end in (("Wake", "new"), ("Sleep", "old")):
        seconds = [switch["own"]["large"] for switch in switches if switch[end] == "large"]
        assert paper.TAKES_S[getattr(paper.actions, name)] == pytest.approx(statistics.median(seconds), abs=5e-4)
    restarts = [each["first_token_s"] for each in measured["restarts"]["switches"] if each["new"] == "large"]
    assert paper.TAKES_S[paper.actions.Start] == pytest.approx(statistics.median(restarts), abs=0.05)


def test_arrivals_have_the_published_shape(paper: ModuleType) -> None:
    for exponent, top in ((0.9, 0.54), (2.1, 0.91)):
        rates = paper.rates(20, exponent, 0.5)
        assert sum(rates) == pytest.approx(10.0)
        assert sum(rates[:4]) / 10 == pytest.approx(top, abs=0.01)
    requests = paper.arrivals([1.0], 50_000.0, random.Random("shape"))
    apart = [later[0] - one[0] for one, later in itertools.pairwise(requests)]
    assert statistics.mean(apart) == pytest.approx(1.0, rel=0.05)
    assert statistics.stdev(apart) / statistics.mean(apart) == pytest.approx(2.0, rel=0.05)
    assert statistics.median(answer for _, _, answer in requests) == pytest.approx(2.58, rel=0.05)


def test_hosts_and_gpus_get_their_share(paper: ModuleType) -> None:
    hosts = paper.of_hosts(list(range(60)), 3)
    assert sorted(rate for host in hosts for rate in host) == list(range(60))
    assert {len(host) for host in hosts} == {20}
    assert max(map(sum, hosts)) - min(map(sum, hosts)) <= 3
    assert paper.on_gpus([8.0, 4.0, 3.0, 2.0], 2) == [0, 1, 1, 1]


def test_the_fewest_gpus_keep_the_tail_and_fewer_do_not(paper: ModuleType) -> None:
    with ThreadPool(1) as pool:
        fleet = paper.HostFleet(1, 0.9, 1 / 30, 300.0, 3, pool)
        by_way = {}
        for way in paper.WAYS:
            gpus = by_way[way] = fleet.gpus_of_a_host(way, 1)
            more = int(-(-gpus // 1))  # on those hosts that are not spared one
            assert fleet._share(fleet.late(way, more), 1) <= paper.TAIL < fleet._share(fleet.late(way, more - 1), 1)
    assert by_way["sleep"] < by_way["restart"]


def test_the_page_has_what_the_command_found(paper: ModuleType) -> None:
    """After a change: as at the top of `benchmarks/many_hosts.py`."""
    page = PAGE.read_text()
    assert paper.table(RESULT) in page
    assert RESULT["given"]["limits_s"] == list(paper.LIMITS_S)
    assert {(each["hosts"], each["exponent"]) for each in RESULT["found"]} == {
        (hosts, exponent) for hosts in paper.HOSTS for exponent in paper.EXPONENTS
    }
    assert f"({PAGE.stem}.png)" in page
    assert PAGE.with_suffix(".png").exists()
    assert sum(len(line.split()) for line in page.splitlines() if not line.startswith("|")) < 500, "a page"


def test_the_figure_can_be_drawn(paper: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paper.draw(RESULT, tmp_path / "figure.svg")
    assert "hosts of 20 models" in (tmp_path / "figure.svg").read_text()
