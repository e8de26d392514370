"""What docs/several-models.md says of the front is what the front does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cumem_sleep.serve.access import Need, place_of
from cumem_sleep.serve.config import FrontConfig, parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several-models.md").read_text()


def rows(after: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    text = PAGE.partition(f"{after}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("\n")[1:-1].split("|")] for line in lines[0].splitlines()[2:]]


def test_paths_on_the_page_need_what_it_says() -> None:
    needs = {"nothing": Need.NOTHING, "the admin token": Need.ADMIN, "an API key, if there are any": Need.KEY}
    found = 0
    for paths, _, need in rows("### An operator's calls"):
        method = paths.strip("`").split()[0]
        for path in re.findall(r"/[\w/]+", paths):
            place = place_of(path)
            assert place is not None
            assert place.need is needs[need]
            assert method in place.methods
            found += 1
    assert found == 8


def test_every_key_of_the_front_is_on_the_page() -> None:
    keys = {field.alias or name for name, field in FrontConfig.model_fields.items()}
    assert {key for row in rows("Of the front:\n") for key in re.findall(r"`(\w+)`", row[0])} == keys


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
def test_the_front_takes_each_file(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_TOKEN", "secret")
    monkeypatch.setenv("CUMEM_SLEEP_ADMIN_TOKEN", "secret")
    assert parse(text, "models.yaml").models


def test_what_the_front_costs_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "serve_overhead.json").read_text())
    overhead = measured["overhead"]
    table = {row[0]: row[1:] for row in rows("### What the front costs")}
    for name in ("first streamed token", "whole answer"):
        more = overhead[name]["more"]
        assert table[name] == [f"{more['median_ms']:.1f} ms", f"{more['p99_ms']:.1f} ms"]
    said = " ".join(PAGE.partition("### What the front costs")[2].partition("\n## ")[0].split())
    assert f"{overhead['cpu of the front']['us_per_piece']:.0f} µs" in said
    assert f"{measured['memory']['more_bytes'] / 2**20:.0f} MiB" in said
    assert f"{overhead['requests in flight']} streams of {overhead['pieces of an answer']} pieces" in said
