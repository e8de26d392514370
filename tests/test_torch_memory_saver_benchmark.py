"""The comparison with torch_memory_saver, on the simulated driver: this layer behind its interface; who is missing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import cumem_sleep

BENCHMARK = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "torch_memory_saver_beside.py"

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(folder: pathlib.Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    command = [
        sys.executable,
        str(BENCHMARK),
        "--out",
        str(folder / "out.json"),
        "--decoder-layers=1",
        "--scale=2048",
        "--pause=0",
        "--gib=30",
    ]
    return subprocess.run(
        [*command, "--vault-options", "--slab-size 64MiB", *options],
        env={
            **os.environ,
            "CUMEM_SLEEP_DRIVER": "sim",
            "PYTHONPATH": os.pathsep.join(filter(None, [path, str(package_root)])),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_ours_is_measured_and_who_is_missing_is_said(tmp_path: pathlib.Path) -> None:
    process = run(tmp_path, "--ways", "theirs;ours;ours, retained;ours, retained, vault")
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    ours = result["training loop"]["ours"]
    assert "ms a step, was spent" in ours["says"]
    assert ours["totals"]["wake"]["phases"]["copy"] > 0
    assert "needs a GPU" in result["training loop"]["theirs"]["error"]
    ways = result["results"]["30 GiB"]
    assert ways.pop("theirs")["error"].startswith("NOT MEASURED: torch_memory_saver ")
    for way, facts in ways.items():
        assert {step: len(answers) for step, answers in facts["steps"].items()} == {
            "first pause": 1,
            "resume at once": 2,
            "pause, unchanged": 1,
            "resume later": 1,
            "pause, changed": 1,
        }
        assert ("vault ready s" in facts) == ("vault" in way)
    assert "NOT MEASURED" in process.stdout


def test_bytes_that_differ_fail_one_way_and_not_the_others(tmp_path: pathlib.Path) -> None:
    """A peer that loses bytes where it does not retain them."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARK.parent)!r})\n"
        "import layers\n"
        "class Forgetful(layers.TorchMemorySaver):\n"
        "    def pool(self, tag):\n"
        "        return self._saver.region(tag=tag)\n"
        "layers.LAYERS['torch_memory_saver'] = Forgetful\n"
    )
    process = run(tmp_path, "--ways", "ours;ours, retained", path=str(tmp_path))
    assert process.returncode == 1
    ways = json.loads((tmp_path / "out.json").read_text())["results"]["30 GiB"]
    assert "bytes differ after it" in ways["ours"]["error"]
    assert "error" not in ways["ours, retained"]


# Their package as far as the loop uses it; its mode `torch` ends the process in the end, as theirs does.
THEIRS = """
import contextlib, os

@contextlib.contextmanager
def configure_subprocess():
    os.environ["TMS_PRELOADED"] = "1"
    yield
    del os.environ["TMS_PRELOADED"]

class Saver:
    hook_mode = "preload"
    region = staticmethod(lambda *_, **__: contextlib.nullcontext())
    def pause(self, tag):
        assert self.hook_mode == "preload" and os.environ.get("TMS_PRELOADED"), "only support interesting region"
    resume = pause

torch_memory_saver = Saver()
"""


def test_the_training_loop_runs_with_theirs_in_its_default_hook_mode(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "theirs" / "torch_memory_saver"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(THEIRS)
    process = run(tmp_path, "--ways", "ours", "--theirs", str(package.parent))
    assert process.returncode == 0, process.stdout + process.stderr
    loops = json.loads((tmp_path / "out.json").read_text())["training loop"]
    assert [("ms a step, was spent" in loops[whose]["says"]) for whose in ("theirs", "ours")] == [True, True]
