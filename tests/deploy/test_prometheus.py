"""Prometheus's rules, by Prometheus itself, and each query of rules and dashboard against what a host says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from engine_metrics import an_engine
from prometheus_client import start_http_server
from prometheus_here import DEPLOY, Prometheus, program, scraping

pytestmark = pytest.mark.deploy
RULES = DEPLOY / "prometheus" / "cumem-sleep.rules.yml"
TESTS = Path(__file__).parent / "rules_tests.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "cumem-sleep.json").read_text())
AT = r"http://(127.0.0.1:\d+)"
QUERIES = [(panel["title"], each["expr"]) for panel in DASHBOARD["panels"] for each in panel.get("targets", ())]


def checked(*arguments: str | Path) -> str:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_configuration_are_valid() -> None:
    checked("check", "rules", "--lint=all", "--lint-fatal", RULES)
    checked("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    checked("test", "rules", TESTS)
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"][1:]}
    tried: dict[str, set[bool]] = {alert: set() for alert in alerts}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for each in test["alert_rule_test"]:
            tried[each["alertname"]].add(bool(each["exp_alerts"]))
    assert all(found == {True, False} for found in tried.values()), tried


# What a host says


@contextlib.contextmanager
def a_command(log: Path, says: str, *arguments: str | Path) -> Iterator[str]:
    """A command of this package; what it says of where it listens."""
    environment = {**os.environ, "CUMEM_SLEEP_DRIVER": "sim"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "cumem_sleep", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        while (found := re.search(says, log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def ask(front: str, model: str) -> None:
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "Who are you?"}]})
    request = urllib.request.Request(f"http://{front}/v1/chat/completions", body.encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as answer:
        assert b"data: " in answer.read()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes the front's demo and its servers, a vault on the simulated driver, and an engine; models take turns
    before.
    """
    folder = tmp_path_factory.mktemp("prometheus")
    program("prometheus")
    engine, _ = start_http_server(0, "127.0.0.1", an_engine())
    vault = ("vault", "--memory", "64MiB", "--metrics", "0", "--socket", folder / "vault.sock")
    with (
        a_command(
            folder / "front.log", r"listens at http://(127.0.0.1:\d+)", "serve", "--demo", "--port", "0"
        ) as front,
        a_command(folder / "vault.log", r"metrics at http://(127.0.0.1:\d+)", *vault) as vault_metrics,
    ):
        targets = {
            "cumem-sleep-serve": front,
            "cumem-sleep-servers": front,
            "cumem-sleep-vault": vault_metrics,
            "vllm": f"127.0.0.1:{engine.server_port}",
        }
        with scraping(folder, targets) as prometheus:
            assert prometheus.result("count(up == 1) == 4")
            for model in ("qwen-8b", "qwen-14b", "qwen-8b"):  # no two of these fit
                ask(front, model)
            yield prometheus
    engine.shutdown()


def test_each_query_of_the_dashboard_finds_something(prometheus: Prometheus) -> None:
    assert len(QUERIES) > 20
    for title, expression in QUERIES:
        query = re.sub(r"\$(?:front|model|vault|engine)\b", ".*", expression.replace("$__rate_interval", "1m"))
        assert "$" not in query
        assert prometheus.result(query), (title, query)


def test_each_variable_of_the_dashboard_has_values(prometheus: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            assert prometheus.result(f"group by ({label}) ({series.replace('$front', '.*')})"), variable["name"]


def test_the_rules_run_and_what_a_request_found_is_seen(prometheus: Prometheus) -> None:
    assert prometheus.result("model:cumem_sleep_serve_wake_seconds:mean1h"), "models were woken"
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert [rule for rule in rules if rule["health"] == "err"] == []
    assert prometheus.result('cumem_sleep_serve_first_token_seconds_count{model="qwen-8b", found="asleep"} == 1')
    assert prometheus.result('cumem_sleep_serve_first_token_seconds_count{model="qwen-8b", found="stopped"} == 1')
