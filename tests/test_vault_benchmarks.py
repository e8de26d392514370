"""The benchmarks of the vault on the simulated driver: its processes, what they say, what a failure leaves."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import cumem_sleep

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
        timeout=100,
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
    assert len(ways["together"]["wake"][0]["each"]) == 2
    assert "vault: replica" in process.stdout


def test_two_clients_fit_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """With the real sizes, on a GPU of 139.8 GiB; contexts and what kernels need come on top."""
    held: list[int] = []

    class Process:
        def __init__(self, *_: object, **__: object) -> None: ...

        def ask(self, what: str, **request: Any) -> dict[str, Any]:
            if what == "load":
                held.append(sum(request["sizes"]) + request["kv_bytes"])
            return {"differing_tensors": []}

        def begin(self, *_: object, **__: object) -> None: ...

        def answer(self, _what: str) -> dict[str, Any]:
            return {"seconds": 1.0}

        def close(self) -> None: ...

    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        vault = importlib.import_module("vault")
        monkeypatch.setattr(vault, "Process", Process)
        options = argparse.Namespace(
            deadline=1.0, pause=0.0, decoder_layers=64, scale=1, vault_options="", out=tmp_path / "out.json"
        )
        bench = vault.Bench(options)
        monkeypatch.setattr(bench, "the_vault", lambda: SimpleNamespace(socket="/vault.sock"))
        monkeypatch.setattr(bench, "see_vault_alone", lambda: None)
        vault.together(bench)
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]
    assert len(held) == 2
    assert 100 << 30 < sum(held) <= 120 << 30


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
