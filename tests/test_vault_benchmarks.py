"""The benchmarks of the vault on the simulated driver: its processes, what they say, what a failure leaves."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cumem_sleep
from cumem_sleep.vault.files import filesystem_of

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(script: str, out: pathlib.Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--out", str(out), "--vault-options", "--slab-size 16MiB", *options],
        cwd=out.parent,
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": str(package_root), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


SMALL = ("--decoder-layers=1", "--scale=2048", "--pause=0")


def test_every_way_is_measured(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "vault.json"
    process = run("vault.py", out, *SMALL)
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    ways = result["ways"]
    weights = result["workload"]["weights_bytes"]
    assert ways.pop("vllm")["error"].startswith("NOT MEASURED: vllm")
    assert list(ways) == ["own", "own_again", "vault", "compressed", "together"]
    assert all("error" not in steps for steps in ways.values())
    for way in ("own", "vault", "compressed"):
        first = ways[way]["first sleep"][0]["layer"]
        assert first["copied_bytes"] >= weights
        assert (first["pinned_by_itself_bytes"] > 0) == (way == "own")
        assert ways[way]["later sleep, nothing changed"][0]["layer"]["copied_bytes"] == 0
        assert first["phases"].keys() >= {"digest", "copy"}
        assert ways[way]["later sleep, everything changed"][0]["layer"]["copied_bytes"] >= weights
    replica = ways["vault"]["replica"]["first sleep"][0]["layer"]
    assert (replica["copied_bytes"], replica["found_bytes"]) == (
        0,
        ways["vault"]["first sleep"][0]["layer"]["copied_bytes"],
    )
    held = ways["vault"]["vault while one and both sleep"]
    assert held["one"]["asleep_bytes"] == held["both"]["asleep_bytes"] == held["both"]["saved_bytes"]
    of_links = [ways[way]["first sleep"][0].get("link") for way in ("own", "vault", "compressed")]
    assert of_links[0] is None
    assert of_links[1]["bytes"] == ways["vault"]["first sleep"][0]["layer"]["copied_bytes"]
    assert of_links[2]["bytes"] > 0
    assert ways["vault"]["wake"][0]["link"]["bytes"] == of_links[1]["bytes"]
    assert ways["vault"]["replica"]["first sleep"][0]["link"] == {"bytes": 0, "busy_s": 0}
    assert "vault: replica" in process.stdout
    two_clients_at_once_and_in_turn(ways["together"], process.stdout)


def two_clients_at_once_and_in_turn(steps: dict[str, Any], printed: str) -> None:
    """With the same bytes in each step; the vault says what its link did meanwhile."""
    copied = steps["first sleep"][0]["link"]["bytes"]
    assert copied >= steps["bytes"]
    for step in ("sleep at once", "sleeps in turn", "wake at once", "wakes in turn"):
        assert len(steps[step]) == 2
        for taken in steps[step]:
            assert len(taken["each"]) == 2
            assert taken["seconds"] == (sum if "in turn" in step else max)(taken["each"])
            assert taken["link"]["bytes"] == copied, "all had changed"
            assert 0 < taken["link"]["busy_s"] < taken["seconds"]
        assert f"together: {step}" in printed
    for client in steps["the clients"]:
        alone = [answer["link"]["bytes"] for step in ("sleeps in turn", "wakes in turn") for answer in client[step]]
        assert alone == [copied / 2] * 4
    assert set(steps["at once / in turn"]) == {"sleep", "wake"}


def test_two_clients_on_one_gpu(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """With the real sizes, on a GPU of 139.8 GiB; contexts and what kernels need come on top.

    None is checked before all are awake: checksums take the GPU's time.
    """
    held: list[int] = []
    asked: list[str] = []
    seconds = iter([1.0] * 4 + [3.0, 4.0, 5.0, 5.0] + [3.0, 3.0, 4.0, 4.0] * 2 + [3.0, 2.0, 5.0, 5.0])

    class Process:
        def __init__(self, *_: object, **__: object) -> None: ...

        def ask(self, what: str, **request: Any) -> dict[str, Any]:
            asked.append(what)
            if what == "load":
                held.append(sum(request["sizes"]) + request["kv_bytes"])
            return {"differing_tensors": []}

        def begin(self, what: str, **_: object) -> None:
            asked.append(f"{what} begins")

        def answer(self, what: str) -> dict[str, Any]:
            asked.append(what)
            return {"seconds": next(seconds)}

        def close(self) -> None: ...

    vault = benchmark_module("vault")
    monkeypatch.setattr(vault, "Process", Process)
    options = argparse.Namespace(
        deadline=1.0, pause=0.0, decoder_layers=64, scale=1, vault_options="", out=tmp_path / "out.json"
    )
    bench = vault.Bench(options)
    gpu = {"copied_out_bytes": 7, "copied_in_bytes": 7, "busy_out_s": 1.0, "busy_in_s": 1.0}
    looked_at = SimpleNamespace(socket="/vault.sock", status=lambda: {"gpus": [gpu]})
    monkeypatch.setattr(bench, "the_vault", lambda: looked_at)
    monkeypatch.setattr(bench, "see_vault_alone", lambda: None)
    steps = vault.together(bench)
    assert len(held) == 2
    assert 100 << 30 < sum(held) <= 120 << 30

    def both(what: str, at_once: bool) -> list[str]:
        return [f"{what} begins"] * 2 + [what] * 2 if at_once else [f"{what} begins", what] * 2

    expected = ["load"] * 2 + both("sleep", True) + both("wake", True) + ["check"] * 2
    for at_once in (True, False, False, True):
        expected += ["change"] * 2 + both("sleep", at_once) + both("wake", at_once) + ["check"] * 2
    assert asked == expected
    assert [taken["seconds"] for taken in steps["sleep at once"]] == [4.0, 3.0]
    assert [taken["seconds"] for taken in steps["sleeps in turn"]] == [6.0, 6.0]
    assert steps["at once / in turn"] == {"sleep": 7 / 12, "wake": 10 / 16}


def test_a_way_that_fails_loses_nothing_of_the_others(tmp_path: pathlib.Path) -> None:
    """A vault that does not start fails its ways; later runs add theirs."""
    out = tmp_path / "vault.json"
    process = run("vault.py", out, *SMALL, "--ways=own,vault", "--vault-options=--gpus 99")
    assert process.returncode == 1
    ways = json.loads(out.read_text())["ways"]
    assert "error" not in ways["own"]
    assert "the vault ended with status" in ways["vault"]["error"]
    process = run("vault.py", out, *SMALL, "--ways=together")
    assert process.returncode == 0, process.stderr
    assert list(json.loads(out.read_text())["ways"]) == ["own", "vault", "together"]


def test_the_vault_is_killed_at_every_kind_of_moment(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "kills.json"
    process = run("vault_kills.py", out, "--gib=0.01", "--kills=3")
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(out.read_text())
    assert [kill["when"] for kill in result["kills"]] == ["in a sleep", "in a wake", "asleep"]
    assert result["complete"]
    assert result["a killed client's memory is back after s"] < 30
    assert "no wrong byte, and every retry worked" in process.stdout


def test_wrong_bytes_are_found(tmp_path: pathlib.Path) -> None:
    """A layer that forgets what it had is caught by the first check."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import layers\n"
        "class Forgetful(layers.CumemSleep):\n"
        "    def sleep(self, level):\n"
        "        self._report = self._allocator.sleep(2)\n"
        "layers.LAYERS['cumem-sleep'] = Forgetful\n"
    )
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    out = tmp_path / "kills.json"
    path = f"{tmp_path}{os.pathsep}{package_root}"
    process = run("vault_kills.py", out, "--gib=0.01", "--kills=1", PYTHONPATH=path)
    assert process.returncode == 1
    assert "wrong bytes in tensors" in json.loads(out.read_text())["error"]


def test_first_clients_of_several_gpus_are_measured(tmp_path: pathlib.Path) -> None:
    """A context takes three seconds once all is pinned. Only first clients of GPUs that were not named wait for it."""
    out = tmp_path / "first_clients.json"
    several = {"CUMEM_SLEEP_SIM_DEVICES": "2", "CUMEM_SLEEP_SIM_CONTEXT_BYTES": str(6 << 20), "COMMIT": "abc"}
    several["CUMEM_SLEEP_SIM_CONTEXT_US_PER_MIB"] = str(3 * 10**6 // 128)
    process = run("vault_first_clients.py", out, "--memory=0.125", "--gib=0.0078125", **several)
    assert process.returncode == 0, process.stdout + process.stderr
    results = json.loads(out.read_text())
    assert (results["gpus"], results["commit"]) == (2, "abc")
    for way, contexts in (("named", [6 << 20, 6 << 20]), ("not named", [6 << 20, 0])):
        found = results[way]
        assert [each["vault_bytes"] for each in found["GPU memory before the first sleeps"]] == contexts
        assert found["pinned_bytes"] == 128 << 20
        assert len(found["first sleeps s"]) == 2
        phases = ("before", "during", "after") if way == "not named" else ("before", "after")  # named, it is a moment
        assert all(found["loop on the first GPU"][phase]["sleep s"] for phase in phases)
    assert results["not named"]["first sleeps s"][1] > 2.9


MACHINE = {"gpu": "A GPU", "gpus": 2, "driver": "580.1", "cores": 16, "torch": "2.11.0"}


def test_files_are_measured_beside_their_ceiling(
    tmp_path: pathlib.Path, benchmark_module: Callable[[str], ModuleType]
) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("pytest's folder is in memory")
    out = tmp_path / "spill.json"
    process = run("vault_spill.py", out, "--decoder-layers=3", "--scale=192", f"--folder={tmp_path}")
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    assert [rate > 0 for each in result["ceilings"] for rate in each.values()] == [True] * 6
    assert len(result["ways"]["memory"]["wake from memory"]) == 3
    for way in ("files", "compressed"):
        found = result["ways"][way]
        assert len(found["wake from files"]) == len(found["wake from memory, beside files"]) == 2
        assert found["written again bytes"] == 0, way
        assert found["vault"]["files_read_bytes"] > 1.9 * found["vault"]["files_written_bytes"] > 0
    for way in ("reload", "saver"):
        assert "not measured" in result["ways"][way]
    assert "x the ceiling)" in process.stdout
    lines = benchmark_module("measured.spill").table({**result, "machine": MACHINE})
    (of_files,) = (line for line in lines if line.startswith("| wake from files"))
    assert of_files.count("×)") == 2
    assert "| – |" in of_files
    result["ways"] |= {"reload": {"reload": [2.0]}, "saver": {"pause to disk": [3.0], "resume from disk": [4.0, 5.0]}}
    last = benchmark_module("measured.spill").table({**result, "machine": MACHINE})[-1]
    assert "in 2.00 s; torch_memory_saver pauses to it in 3.00 s and resumes in 4.00." in last
    assert "Compressed, a wake read 0." in last


def test_links_of_other_gpus_are_measured_beside_their_ceiling(
    tmp_path: pathlib.Path, benchmark_module: Callable[[str], ModuleType]
) -> None:
    out = tmp_path / "links.json"
    options = [*SMALL, "--rounds=1", "--compress", "--slots", "3"]
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / "vault_links.py"), "--out", str(out), *options],
        cwd=tmp_path,
        env={
            **os.environ,
            "CUMEM_SLEEP_DRIVER": "sim",
            "CUMEM_SLEEP_SIM_DEVICES": "2",
            "PYTHONPATH": str(pathlib.Path(cumem_sleep.__path__[0]).parent),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    assert list(result["ceilings"]) == list(result["ways"]) == ["1", "2"]
    for ways in result["ways"].values():
        assert list(ways) == ["plain", "compressed", "compressed, 3 slots"]
        assert len(ways["plain"]["links"]) == 2
        assert ways["plain"]["links"][0]["copied_in_bytes"] > 0
    assert process.stdout.count("x the ceiling)") == 24
    assert min(result["decoder"]["steps_per_s"].values()) > 0
    assert result["decoder"]["steps"]["sleep"]
    for seconds in result["together"].values():
        assert [len(some) for some in seconds.values()] == [1, 1]
    assert list(result["together"]) == ["without help", "with help"]
    (said,) = benchmark_module("measured.links").manners({**result, "machine": MACHINE})
    assert "tokens a second" in said
    assert said.count("without help") == 2
