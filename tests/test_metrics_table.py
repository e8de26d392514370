"""The table of metrics, who names them, and what the exporters make of it."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest

from cumem_sleep import metrics
from cumem_sleep.metrics import BUCKETS_S, Histogram, Samples
from cumem_sleep.serve.status import FOUND, SWITCHES, Phase

ROOT = pathlib.Path(__file__).parent.parent
DEPLOYED = [f"examples/deploy/{name}" for name in ("prometheus/cumem-sleep.rules.yml", "grafana/cumem-sleep.json")]
TABLES = (metrics.ENGINE, metrics.FRONT, metrics.VAULT, metrics.VAULT_GPU, metrics.VAULT_CLIENT)
ALL = {metric.full_name: metric for table in TABLES for metric in table.values()}


@pytest.mark.parametrize("name", ["docs/metrics.md", *DEPLOYED])
def test_queries_rules_and_dashboards_name_metrics_and_labels_that_exist(name: str) -> None:
    text = (ROOT / name).read_text().replace('\\"', '"').rpartition("## Queries")[2]
    # Not those that rules make, which have colons.
    found = re.findall(r"(?<![\w:])(cumem_sleep_\w+?)(?:_bucket|_count|_sum)?\b(?!:)(?:\{([^}]*)\})?", text)
    assert len(found) > 5
    assert set(FOUND) == set(Phase)
    assert len(ALL) == sum(map(len, TABLES))
    for each, selector in found:
        assert each in ALL, each
        labels = {"instance", "model", *ALL[each].labels}  # `model`: on the front's page of all servers
        assert set(re.findall(r"(\w+)=", selector)) <= labels, (each, selector)
    for label, words in (("kind", SWITCHES), ("found", FOUND.values()), ("result", ("ok", "failed"))):
        for said in re.findall(rf'\b{label}=~?"([^"]*)"', text):
            assert set(said.split("|")) <= set(words), said


def test_a_sample_has_exactly_the_labels_of_its_metric() -> None:
    samples = Samples(metrics.ENGINE)
    with pytest.raises(KeyError):
        samples.add("no_such", 1)
    for labels in ({}, {"rank": "0", "tag": "weights"}):
        with pytest.raises(AssertionError, match="labels of sleep_level"):
            samples.add("sleep_level", 1, **labels)


def filled() -> Samples:
    samples = Samples(metrics.VAULT_CLIENT | metrics.VAULT | metrics.FRONT)
    samples.add("vault_client_asleep_bytes", 2 << 20, pid="7", name='a "b"\\\n')
    samples.add("vault_client_asleep_bytes", 0.5, pid="8", name="")
    samples.add("vault_refused", 3)
    histogram = Histogram()
    for seconds in (0.2, BUCKETS_S[-1], 1e6):
        histogram.observe(seconds)
    samples.add("serve_actuation_seconds", histogram, model="a", found="asleep")
    return samples


def test_as_text() -> None:
    counts = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3]  # a bound belongs to its bucket
    actuation, of = "cumem_sleep_serve_actuation_seconds", 'model="a",found="asleep"'
    assert filled().text().splitlines() == [
        "# HELP cumem_sleep_vault_client_asleep_bytes Backups of the client's segments that sleep.",
        "# TYPE cumem_sleep_vault_client_asleep_bytes gauge",
        'cumem_sleep_vault_client_asleep_bytes{pid="7",name="a \\"b\\"\\\\\\n"} 2097152',
        'cumem_sleep_vault_client_asleep_bytes{pid="8",name=""} 0.5',
        "# HELP cumem_sleep_vault_refused_total Requests that were refused.",
        "# TYPE cumem_sleep_vault_refused_total counter",
        "cumem_sleep_vault_refused_total 3",
        f"# HELP {actuation} {ALL[actuation].text}",
        f"# TYPE {actuation} histogram",
        *(
            f'{actuation}_bucket{{{of},le="{bound}"}} {count}'
            for bound, count in zip((*BUCKETS_S, "+Inf"), counts, strict=True)
        ),
        f"{actuation}_count{{{of}}} 3",
        f"{actuation}_sum{{{of}}} 1000300.2",
    ]


@pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="needs prometheus_client")
def test_the_text_is_what_prometheus_client_would_write() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    read = text_string_to_metric_families(filled().text())
    assert [(family.name, family.type, family.samples) for family in read] == [
        (family.name, family.type, family.samples) for family in filled().families()
    ]
