"""docs/support.md claims no more than there is evidence for."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
from typing import Any

import pytest

from cumem_sleep.vllm import compatibility, kept_kv

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "support.md").read_text()
RESULTS = pathlib.Path("benchmarks", "results")


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "support_matrix", raising=False)
    return importlib.import_module("support_matrix")


def test_the_page_is_made_from_the_evidence(matrix: Any) -> None:
    """After a change: `python tools/generated_tables.py`."""
    for heading, table in matrix.tables().items():
        assert f"\n{table}\n" in PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0] + "\n"


def test_every_cell_but_the_unknown_ones_names_evidence_that_exists(matrix: Any) -> None:
    for table in matrix.tables().values():
        for row in table.splitlines()[2:]:
            for cell in row.strip("|").split(" | ")[1:]:
                links = re.findall(r"\[(?:H100|H200|simulator|refused)\]\(\.\./([\w./]+)\)", cell)
                assert links or cell.strip() == "unknown", cell
                assert all((ROOT / link).is_file() for link in links)


def test_a_result_that_is_gone_failed_or_is_of_no_gpu_is_no_evidence(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    machine = {"gpu": "NVIDIA H200", "vllm": "0.26.0"}

    def link(result: dict[str, Any], *place: str) -> str:
        (tmp_path / RESULTS / "one.json").write_text(json.dumps(result))
        return str(matrix.Ran("one.json", place).link)

    assert link({"machine": machine}) == "[H200](../benchmarks/results/one.json)"
    assert link({"lora": {"machine": machine, "passed": True}}, "lora") == "[H200](../benchmarks/results/one.json)"
    with pytest.raises(SystemExit, match=r"no result other\.json"):
        _ = matrix.Ran("other.json").link
    for bad, place, why in (
        ({"machine": machine}, ("lora",), "no result"),
        ({"lora": {"machine": machine, "passed": False}}, ("lora",), "failed"),
        ({"machine": machine, "failed": {"vault": "why"}}, (), "failed"),
        ({"machine": machine, "wrong": "a byte"}, (), "failed"),
        ({"machine": machine | {"simulated": True}}, (), "of no GPU"),
        ({"machine": {"gpu": "none (simulated driver)"}}, (), "of no GPU"),
    ):
        with pytest.raises(SystemExit, match=why):
            link(bad, *place)


def test_a_test_that_is_gone_is_no_evidence(matrix: Any) -> None:
    for file, name in (("vllm/test_nothing.py", "test_level_2"), ("vllm/test_worker.py", "test_nothing")):
        with pytest.raises(SystemExit, match=rf"no test {name} in tests/{file}"):
            _ = matrix.Tested(file, name).link


def test_a_test_counts_for_the_versions_with_which_it_runs(matrix: Any) -> None:
    versions = matrix.vllm_versions()

    def runs(file: str, name: str) -> list[str]:
        return [version for version in versions if matrix.Tested(file, name).runs_with(version)]

    assert runs("vllm/test_worker.py", "test_level_2") == versions
    assert runs("vllm/test_idle_episodes.py", "test_it_sleeps_in_time_and_under_no_request") == versions[1:]
    assert runs("vllm/test_serve_level_3.py", "test_answers_wakes_and_ends") == versions[1:], "as all in that file"
    assert runs("vllm/test_gate_calls.py", "test_wake_is_wake_up") == versions[-1:], "as `.ci/run` says"
    assert not matrix.Tested("vllm/test_worker.py", "test_level_2").runs_with("0.27.0")


def test_what_the_code_refuses_is_refused_whatever_ran(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for feature in matrix.WITH_VLLM:
        for version in ("0.10.2", "0.34.0"):
            assert feature.cell(version) == "[refused](../cumem_sleep/vllm/compatibility.py)"
        assert feature.cell("0.27.0") == (
            "[refused](../cumem_sleep/vllm/kept_kv.py)" if feature.versions else "unknown"
        )
    (kept,) = (feature for feature in matrix.WITH_VLLM if feature.versions)
    assert kept.versions == kept_kv.VERSIONS
    assert [kept.cell(version).partition("]")[0] for version in ("0.11.2", "0.33.0")] == ["[refused", "[simulator"]
    monkeypatch.setattr(compatibility, "OLDEST", (0, 27))
    assert all("compatibility.py" in feature.cell("0.26.0") for feature in matrix.WITH_VLLM)
