"""The comparison with other layers: its processes, pipes and results, on the simulated driver; and the tables.

The layers that need a GPU are said to be missing here, which is what a user sees without them.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cumem_sleep
from cumem_sleep.tools.bench import palette
from cumem_sleep.tools.machine import MachineFacts

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = pytest.mark.sim


def run_peers(out: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    small = ["--decoder-layers=1", "--scale=2048", "--pause=0", "--rounds=1", "--processes=2"]
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), "--out", str(out), *small, *options],
        cwd=pathlib.Path(__file__).parent,  # not the checkout, whose package may not be built
        env={**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": str(package_root)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Output and JSON of a small run of all layers."""
    out = tmp_path_factory.mktemp("peers") / "peers.json"
    process = run_peers(out)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads(out.read_text())


@pytest.fixture
def tables(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("result_tables")


@pytest.mark.slow
def test_every_step_is_measured_in_fresh_processes(peers: tuple[str, dict[str, Any]]) -> None:
    _, result = peers
    seconds = result["layers"]["cumem-sleep"]["seconds"]
    rounds = {step: len(values) for step, values in seconds.items()}
    assert rounds["first sleep"] == 2
    assert rounds["wake right after sleeping"] == 3
    assert rounds["sleep at level 2"] == 1
    assert rounds["malloc of a 20 MiB segment"] == 5
    assert len(result["link"]["to_host"]) == 3
    assert all(min(values) > 0 for values in (*seconds.values(), *result["link"].values()))
    assert result["layers"]["cumem-sleep"]["wakes_checked"] == 4
    assert result["layers"]["cumem-sleep"]["error"] is None
    assert result["machine"]["command"].startswith("python peers.py --out peers.json --decoder-layers=1 ")


@pytest.mark.slow
def test_missing_layers_are_said(peers: tuple[str, dict[str, Any]]) -> None:
    output, result = peers
    for layer, package in (("vllm", "vllm"), ("torch_memory_saver-retained", "torch_memory_saver")):
        reason = result["layers"][layer]["not_installed"]
        assert reason in (f"{package} is not installed", f"{package} needs a GPU")
        assert re.search(rf"^{layer}.*NOT MEASURED: {reason}$", output, re.MULTILINE)


def test_commands_are_without_folders(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [
        "/somewhere/vault.py",
        "--out=/somewhere/a.json",
        "--out",
        "/a.json",
        "--options=--model=A/B --seed=1",
        "A/B",
    ]
    monkeypatch.setattr("sys.argv", argv)
    found = benchmark_module("record").command()
    assert found == ["python", "vault.py", "--out=a.json", "--out", "a.json", "--options=--model=A/B --seed=1", "A/B"]


def test_results_carry_the_facts_that_bench_reports(
    benchmark_module: Callable[[str], ModuleType],
    tables: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    torch = ModuleType("torch")
    gpu = SimpleNamespace(name="A GPU", total_memory=1 << 30)
    torch.__version__ = "2.11.0+cu130"  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(get_device_properties=lambda _: gpu, device_count=lambda: 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 5, 16\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", ["/somewhere/codec.py", "--out", "/elsewhere/codec.json"])
    monkeypatch.delenv("CUMEM_SLEEP_DRIVER", raising=False)
    benchmark_module("record").write(tmp_path / "codec.json", {"answer": 42})
    written = json.loads((tmp_path / "codec.json").read_text())
    facts = written["machine"]
    assert written["answer"] == 42
    assert facts.keys() > {field.name for field in fields(MachineFacts)}
    assert (facts["gpu"], facts["gpus"], facts["torch"]) == ("A GPU", 2, "2.11.0+cu130")
    assert (facts["command"], facts["pcie generation, width"]) == ("python codec.py --out codec.json", "5, 16")
    assert tables.results.machine(written).startswith("A GPU, driver ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("raise RuntimeError('no luck')", "sleep: RuntimeError: no luck"),
        ("import os; print('last words', flush=True); os._exit(3)", "sleep: ended with status 3"),
    ],
)
def test_a_failing_layer_loses_nothing_of_the_others(
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    broken: str,
    said: str,
) -> None:
    """A layer that fails at its second sleep keeps its first, and the next layer is measured."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import layers\n"
        "class Broken(layers.CumemSleep):\n"
        "    title = 'broken'\n"
        "    sleeps = 0\n"
        "    def sleep(self, level):\n"
        "        self.sleeps += 1\n"
        f"        if self.sleeps > 1: {broken}\n"
        "        super().sleep(level)\n"
        "layers.LAYERS['broken'] = Broken\n"
    )
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{package_root}")
    recording = benchmark_module("recording")
    layers = benchmark_module("layers")
    monkeypatch.setitem(layers.LAYERS, "broken", layers.CumemSleep)
    workload = recording.Workload([4096] * 3, 4096, 2, 1, 0.0, 60.0, 4096, 2)
    run = recording.Recording(workload, lambda _: None)
    run.run(["broken", "cumem-sleep"])
    assert run.records["broken"].error.startswith(said)
    assert "last words" not in broken or "last words" in run.records["broken"].error
    steps = {step: len(seconds) for step, seconds in run.records["broken"].seconds.items() if step in recording.STEPS}
    assert steps == {recording.FIRST_SLEEP: 1, recording.WAKE: 1}
    assert run.records["cumem-sleep"].error is None
    assert len(run.records["cumem-sleep"].seconds["first sleep"]) == 2


@pytest.mark.slow
def test_changed_bytes_are_found(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import layers\n"
        "class Forgetful(layers.CumemSleep):\n"
        "    def sleep(self, level):\n"
        "        self._allocator.sleep(2)\n"
        "layers.LAYERS['cumem-sleep'] = Forgetful\n"
    )
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{package_root}")
    recording = benchmark_module("recording")
    run = recording.Recording(recording.Workload([4096] * 3, 4096, 1, 1, 0.0, 60.0, 4096, 2), lambda _: None)
    run.run(["cumem-sleep"])
    assert "bytes differ after it, in tensors [0, 1, 2]" in run.records["cumem-sleep"].error


# The tables of the documentation


MACHINE = {"gpu": "A GPU", "driver, pcie generation, width": "580.1, 5, 16", "cores": 16, "torch": "2.11.0"}


@pytest.fixture
def results(
    peers: tuple[str, dict[str, Any]], tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> pathlib.Path:
    """A project whose results are made up, and whose pages have nothing in them yet."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "peers.json").write_text(json.dumps({**peers[1], "machine": MACHINE}))
    for real in (BENCHMARKS / "results").glob("*.json"):
        if not real.name.startswith("peers"):
            (folder / real.name).write_bytes(real.read_bytes())
    (tmp_path / "docs").mkdir()
    for page, blocks in tables.BLOCKS.items():
        lines = "\n".join(mark for name in blocks for mark in tables.marks(name))
        (tmp_path / page).write_text(f"Above.\n\n{lines}\n\nBelow.\n")
    monkeypatch.setattr(tables.results, "ROOT", tmp_path)
    monkeypatch.setattr(tables.results, "RESULTS", folder)
    monkeypatch.setattr(tables.peers, "PLOT", tmp_path / "docs" / "peers.svg")
    monkeypatch.setattr(tables.peers, "draw", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["result_tables.py"])
    return folder


@pytest.mark.slow
def test_tables_say_what_was_not_measured(results: pathlib.Path, tables: ModuleType) -> None:
    tables.main()
    page = (results.parent / "docs" / "benchmarks.md").read_text()
    assert page.startswith("Above.\n")
    assert page.endswith("Below.\n")
    peers = page[page.index("**Compared with its peers**") :]
    first_sleep = next(line for line in peers.splitlines() if line.startswith("| first sleep | "))
    assert first_sleep.count("not measured") == 3
    assert re.search(r"^vLLM `cumem` was not measured: vllm (is not installed|needs a GPU)\.$", page, re.MULTILINE)
    hooks = next(line for line in page.splitlines() if line.startswith("| malloc and free of a 2 MiB segment, µs | "))
    assert hooks.count("not measured") == 3


def test_the_plots_have_one_colour_for_one_thing(tables: ModuleType) -> None:
    layers = [layer["title"].replace("`", "") for layer in tables.load("peers.json")["layers"].values()]
    ways = [
        tables.switching.title_of(way) for way in tables.switching.ways_of(tables.load(tables.switching.RESULT), None)
    ]
    for labels, plot in ((layers, tables.peers.PLOT), (ways, tables.switching.PLOT)):
        colours = {palette.colour_of(label) for label in labels}
        assert len(colours) == len(labels)
        assert set(re.findall(r"fill: (#\w{6})\"", plot.read_text())) - {"#ffffff"} == {c.lower() for c in colours}
    of_ours = {
        palette.colour_of(label) for label in (*layers, *ways) if label in ("cumem-sleep", "cumem-sleep, level 1")
    }
    of_vllm = {palette.colour_of(label) for label in (*layers, *ways) if label.startswith("vLLM")}
    assert (of_ours, of_vllm) == ({palette.OURS}, {palette.VLLM})
    with pytest.raises(KeyError, match="choose one in"):
        palette.colour_of("a new one")


@pytest.mark.slow
def test_tables_of_vllm(results: pathlib.Path, tables: ModuleType) -> None:
    """A scenario that failed is said, a way of serving that failed is left out."""
    scenarios = json.loads((results / "vllm_scenarios.json").read_text())
    for name, outcome in scenarios["scenarios"].items():
        outcome["passed"] = name != "lora"
    (results / "vllm_scenarios.json").write_text(json.dumps(scenarios))
    serve = json.loads((results / "vllm_serve.json").read_text())
    serve["ways"]["vllm"] = {"error": "no luck"}
    serve["ways"]["cold"]["later_sleeps_s"] = [0.1, 0.3, 0.2]
    (results / "vllm_serve.json").write_text(json.dumps(serve))
    tables.main()
    docs = results.parent / "docs"
    page = (docs / "vllm-scenarios.md").read_text()
    assert len(re.findall(r"^\| lora \| .* \*\*Failed\.\*\* \|$", page, re.MULTILINE)) == 1
    assert page.count("**Failed.**") == 1
    page = (docs / "benchmarks.md").read_text()
    served = page[page.index("**`vllm serve`") : page.index("**Compared with its peers**")]
    assert "vLLM's own |" not in served
    assert "| later sleeps | 0.200 (0.100–0.300) |" in served


@pytest.mark.slow
def test_tables_of_the_vault_and_of_the_other_package(results: pathlib.Path, tables: ModuleType) -> None:
    """Ranges instead of medians of two, beside the link or the other package; a way that failed is left out."""
    vault = json.loads((results / "vault.json").read_text())
    vault["link"] = {"to_host": [0.2, 0.1], "to_device": [0.1, 0.1]}
    two_wakes: dict[str, Any] = {"wake": [{"seconds": 3.0}, {"seconds": 2.0}], "bytes": 10 * vault["link_bytes"]}
    vault["ways"]["vault"] |= two_wakes
    vault["ways"]["vault"]["first sleep"][0]["link"]["busy_s"] = 0.9
    vault["ways"]["own"] |= {**two_wakes, "bytes": 20 * vault["link_bytes"]}
    vault["ways"]["compressed"] = {"error": "no luck"}
    (results / "vault.json").write_text(json.dumps(vault))
    saver = json.loads((results / "saver.json").read_text())
    ways = saver["results"]["30 GiB"]
    ways["theirs, retained"]["steps"]["resume at once"] = [{"seconds": 0.5}, {"seconds": 1.0}]
    ways["ours, retained"]["steps"]["resume at once"] = [{"seconds": 2.0}, {"seconds": 1.0}]
    (results / "saver.json").write_text(json.dumps(saver))
    tables.main()
    page = (results.parent / "docs" / "vault.md").read_text()
    of_vault = page[page.index("<!-- vault: ") :]
    assert "| the vault | a replica, while the first one sleeps |\n" in of_vault
    assert cells_of(of_vault.splitlines(), "wake")[:2] == ["2.00–3.00 (1.00–1.50 ×)", "2.00–3.00 (2.00–3.00 ×)"]
    busy = cells_of(of_vault.splitlines(), "in the first sleep the vault's link was busy for")
    assert busy == ["–", "0.900", "0.000"]
    resumed = next(
        line
        for line in (results.parent / "docs" / "torch-memory-saver.md").read_text().splitlines()
        if line.startswith("| resume at once | ")
    )
    assert " | 0.500–1.00 | 1.00–2.00 (0.50 ×) | " in resumed


def cells_of(lines: list[str], head: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(f"| {head} | "))
    return line.strip("| ").split(" | ")[1:]


def test_table_of_vllm_at_level_3(tables: ModuleType) -> None:
    """One column for each place of backups; what one of them lacks or did not measure is told apart from nothing."""
    own, vault = (tables.load(f"vllm_level_3{which}.json") for which in ("_own", ""))
    cycles = own["ways"]["own"]["cycles"] = own["ways"]["own"]["cycles"][:2]
    cycles[1]["checkpoint_s"] = 2.0
    vault["arguments"]["server_options"] = "--max-num-seqs=9"
    of_vault = vault["ways"]["vault_compressed"]
    of_vault["two"]["switches"][0]["gpu_share"] = 0.5
    lines = tables.vllm_level_3.table(own, vault)
    assert "default CUDA graphs, `--max-num-seqs=9`. " in lines[0]
    assert "|  | own memory | the vault, compressed |" in lines
    assert cells_of(lines, "cycles with the same tokens")[0] == "2"
    assert cells_of(lines, "checkpoint")[0] == "2.000 s"
    assert cells_of(lines, "kept on the GPU at level 1")[0] == "not measured"
    assert cells_of(lines, "GPU memory in use asleep grew by")[0] == "not measured"
    assert cells_of(lines, "the vault's own GPU memory")[0] == "–"
    assert all(row in "\n".join(lines) for row in tables.vllm_level_3.ROWS)
    assert "each had at least 0.500 of the GPU while awake, and the same tokens after 6 of 6 switches. " in lines[-1]
    of_vault["two"]["switches"] = of_vault["two"]["switches"][:2]
    of_vault["failed"]["two"] = "OutOfTime: no time left\nand more"
    last = tables.vllm_level_3.table(own, vault)[-1]
    assert "the same tokens after 2 of 6 switches (then: OutOfTime: no time left). " in last


def test_table_of_models_behind_the_front(tables: ModuleType) -> None:
    """A model's wakes are in its own column, its sleeps too, whoever was switched to; errors and failures are said."""
    result = tables.load("serve_models.json")
    result["one after the other"]["switches"] = [
        {"old": "small", "new": "large", "first_token_s": 0.5, "own": {"small": 0.1, "large": 0.3}},
        {"old": "large", "new": "fp8", "first_token_s": 0.7, "own": {"large": 0.2, "fp8": 0.4}},
        {"old": "fp8", "new": "small", "first_token_s": 0.9, "own": {"fp8": 0.15, "small": 0.6}},
    ]
    result["many at once"]["errors"] = {"Failed: 503": 2, "OSError: gone": 1}
    result["failed"] = {"restart": "OutOfTime: no time left\nand more"}
    result["machine"]["command"] = "python serve_models.py --server-options=--max-num-seqs=9"
    result["execution"] = "graphs"
    lines = tables.serve_models.table(result)
    assert " with CUDA graphs, not compiled, `--max-num-seqs=9`; " in lines[0]
    assert "|  | 8B | 14B fp8 | 0.6B |" in lines
    assert cells_of(lines, "first token after a switch to it") == ["0.500", "0.700", "0.900"]
    assert cells_of(lines, "its wake in such a switch") == ["0.300", "0.400", "0.600"]
    assert cells_of(lines, "its sleep in a switch to another") == ["0.200", "0.150", "0.100"]
    assert " 3 errors." in lines[-1]
    assert lines[-1].endswith(" Failed: restart: OutOfTime: no time left.")


def test_table_of_switches_beside_restarts(tables: ModuleType) -> None:
    """Each model has its own first token while awake and its own restart; one that was left out is said."""
    result = tables.load("serve_models.json")
    one = result["one after the other"]
    one |= {"limit": "as it is said", "compared": 137, "within the limit": 136}
    one["first tokens of a model that is awake"] = {"large": [0.04, 0.03, 0.05], "fp8": [0.09], "small": []}
    result["restarts"] = {
        "switches": [
            {"old": "small", "new": "large", "stop_s": 2.0, "first_token_s": 52.0},
            {"old": "large", "new": "small", "stop_s": 2.0, "first_token_s": 32.0},
        ],
        "left out": {"fp8": "44 s were left, and its first start took 60 s"},
    }
    lines = tables.serve_models.table(result)
    assert cells_of(lines, "first token while it was awake") == ["0.040 (0.030–0.050)", "0.090", "not measured"]
    assert cells_of(lines, "first token after a restart instead") == ["52.0", "not measured", "32.0"]
    assert lines[-1].startswith("Of 137 first tokens after a switch 136 took no longer than 1.05 times sleep and wake,")
    assert " 14B fp8 was not restarted: 44 s were left, and its first start took 60 s." in lines[-1]


def test_clients_that_share_the_link(tables: ModuleType) -> None:
    """Both together count against the link, by the one that ended last; beside them, both in turn."""
    result = tables.load("vault.json")
    result |= {"link_bytes": 10, "link": {"to_host": [1.5, 1.0], "to_device": [2.0]}}
    result["ways"]["together"] |= {
        "bytes": 40,
        "first sleep": [{"seconds": 6.0}],
        "wake": [{"seconds": 4.0}],
        "sleep at once": [{"seconds": 5.0}, {"seconds": 5.5}],
        "sleeps in turn": [{"seconds": 6.0}],
        "wake at once": [{"seconds": 9.0}],
        "wakes in turn": [{"seconds": 8.0}],
    }
    said = tables.vault.clients_together(result)
    assert "asleep for the first time after 6.00 s (1.50 ×), and awake again after 4.00 s (0.50 ×). Then " in said
    assert said.endswith(
        "asleep after 5.00–5.50 s (1.25–1.38 ×) at once, after 6.00 s (1.50 ×) one after the other; and awake again"
        " after 9.00 s (1.12 ×) and 8.00 s (1.00 ×)."
    )


@pytest.mark.slow
def test_table_of_compressed_backups(
    benchmark_module: Callable[[str], ModuleType], results: pathlib.Path, tables: ModuleType
) -> None:
    """Figures are medians beside the link of the same process; a process that failed is left out."""
    compressed = benchmark_module("compressed")

    def one(content: str, compress: str, dirty_s: tuple[float, ...], stored: float) -> dict[str, Any]:
        steps = [(name, seconds) for name in tables.compressed.STEPS for seconds in dirty_s]
        result: dict[str, Any] = {
            "content": content,
            "compress": compress,
            "machine": MACHINE,
            "bytes": 55 * 10**9,
            "link_gbps": {"to_host": 55.0, "to_device": 110.0},
            "steps": [
                {"name": name, "seconds": seconds, "stored_bytes": int(stored * 55e9), "phases": {"release": 0.1}}
                for name, seconds in steps
            ],
        }
        return {**result, "summary": compressed.summary(result)}

    raw, auto = one("bf16 normal", "off", (1.0, 1.2, 2.0), 1.0), one("bf16 normal", "auto", (0.5, 0.6, 0.7), 0.67)
    failed = {"content": "e4m3 normal", "compress": "auto", "error": "ended with 1"}
    (results / "compressed.json").write_text(json.dumps({"machine": MACHINE, "results": [raw, auto, failed]}))
    tables.main()
    page = (results.parent / "docs" / "benchmarks.md").read_text()
    assert "| bf16 normal | off | 1.000 | 1.20 | 1.20 (0.83 ×) | 1.20 | 1.20 (0.42 ×) | 1.20 (0.42 ×) |" in page
    assert "| bf16 normal | auto | 0.670 | 0.600 | 0.600 (1.67 ×) | 0.600 | 0.600 (0.83 ×) | 0.600 (0.83 ×) |" in page
    assert "0.500 s (2.00 ×) pass until everything is backed up" in page
    assert "e4m3 normal | auto" not in page
    assert "ended with 1" in compressed.table([raw, failed])


@pytest.mark.slow
@pytest.mark.usefixtures("results")
def test_check_notices_other_figures_and_an_old_plot(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["result_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"README\.md: its figures"):
        tables.main()
    monkeypatch.setattr(sys, "argv", ["result_tables.py"])
    tables.main()
    monkeypatch.setattr(sys, "argv", ["result_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"peers\.svg: not made from"):
        tables.main()
    tables.peers.PLOT.write_text(f"<svg>{tables.digest_of('peers.json')}</svg>")
    tables.main()


@pytest.mark.slow
def test_missing_and_simulated_results_are_refused(
    results: pathlib.Path, tables: ModuleType, peers: tuple[str, dict[str, Any]]
) -> None:
    (results / "peers.json").write_text(json.dumps(peers[1]))
    with pytest.raises(SystemExit, match="simulated"):
        tables.main()
    (results / "peers.json").unlink()
    with pytest.raises(SystemExit, match=r"peers\.json is missing"):
        tables.main()


@pytest.mark.slow
def test_the_plot_is_the_same_for_the_same_result(
    results: pathlib.Path, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.undo()
    monkeypatch.setattr(tables.results, "RESULTS", results)
    plots = []
    for name in ("a.svg", "b.svg"):
        monkeypatch.setattr(tables.peers, "PLOT", results / name)
        tables.peers.draw(tables.load("peers.json"))
        plots.append((results / name).read_text())
    assert plots[0] == plots[1]
    assert tables.digest_of("peers.json") in plots[0]
    assert "first sleep" in plots[0]
