"""The switching benchmark against a server without a model (`fake_model_server.py`), and what is made of its result."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from support import two_free_ports

import cumem_sleep

TESTS = pathlib.Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"

pytestmark = [pytest.mark.sim, pytest.mark.slow]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """Of the benchmark and its servers; there is a GPU on which nobody is awake."""
    (tmp_path / "gpu").mkdir()
    package_root = pathlib.Path(cumem_sleep.__path__[0]).parent
    return {**os.environ, "FAKE_GPU": str(tmp_path / "gpu"), "PYTHONPATH": str(package_root)}


@pytest.fixture
def command(tmp_path: pathlib.Path, benchmark_module: Callable[[str], ModuleType]) -> list[str]:
    """Two models of the smallest shape, whose checkpoints seem to be there already."""
    checkpoints = benchmark_module("checkpoints")
    for seed in (1, 2):
        folder = tmp_path / "checkpoints" / f"tiny-{seed}"
        checkpoints.write_config(folder, checkpoints.SHAPES["tiny"])
        (folder / checkpoints.INDEX).write_text(json.dumps({"metadata": {"seed": seed}}))
        (folder / "model.safetensors").write_bytes(b"weights")
    server = f"{sys.executable} {TESTS / 'fake_model_server.py'}"
    start = [sys.executable, str(BENCHMARKS / "switching.py"), "--out", str(tmp_path / "switching.json")]
    start += ["--models", "tiny,tiny", "--work", str(tmp_path / "work"), "--checkpoints", str(tmp_path / "checkpoints")]
    return [*start, "--port", str(two_free_ports()), "--server-command", server]


@pytest.fixture
def run(command: list[str], environment: dict[str, str]) -> Run:
    def start(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return start


def result_of(tmp_path: pathlib.Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "switching.json").read_text())
    return result


def test_all_ways_are_measured_and_later_runs_add_theirs(run: Run, tmp_path: pathlib.Path) -> None:
    process = run(CUMEM_SLEEP_DISABLE="1")  # which way is which is not for the environment to say
    assert process.returncode == 0, process.stdout + process.stderr
    ways = result_of(tmp_path)["ways"]
    assert list(ways) == ["vllm", "level1", "level2", "restart"]
    directions = {name: [f"{switch['old']}{switch['new']}" for switch in way["switches"]] for name, way in ways.items()}
    assert directions["restart"] == ["AB", "BA"]
    assert all(directions[name] == ["AB", "BA", "AB", "BA", "AB"] for name in ("vllm", "level1", "level2"))
    for way in ways.values():
        assert way["error"] is None
        assert all(switch["tokens_identical"] for switch in way["switches"])
        assert way["tokens"] == ways["vllm"]["tokens"]
    assert ways["vllm"]["tokens"]["A"] != ways["vllm"]["tokens"]["B"]
    assert [sleep["model"] for sleep in ways["level1"]["first_sleeps"]] == ["A", "B"]
    assert ways["level2"]["shares_servers_of"] == "level1"
    assert ways["level1"]["prepared_s"].keys() == ways["level2"]["layer_status"].keys() == {"A", "B"}
    assert ways["vllm"]["layer_status"] == {}
    assert all(switch["reload_s"] > 0 for switch in ways["level2"]["switches"])
    assert all(switch["checkpoint_cached"] == 1 for switch in ways["level2"]["switches"] + ways["restart"]["switches"])
    assert [start["compile_cache_warm"] for start in ways["vllm"]["starts"]] == [False, False]
    assert all(switch["compile_cache_warm"] for switch in ways["restart"]["switches"])
    assert not list((tmp_path / "gpu").iterdir())  # all servers ended
    assert (tmp_path / "switching.log").read_text().count("== cumem-sleep, level 1, server") == 2

    process = run("--fp8", "--ways", "level1,vllm", "--switches", "1")
    assert process.returncode == 0, process.stdout + process.stderr
    added = result_of(tmp_path)["ways"]
    assert {name: added[name] for name in ways} == ways
    assert [name for name in added if name not in ways] == ["level1 fp8", "vllm fp8"]
    assert added["vllm fp8"]["same_tokens_as"] == {"level1 fp8": True}

    process = run("--prompt-tokens", "4")
    assert process.returncode == 1
    assert "switching.json is of another workload" in process.stderr


def test_a_restart_never_finds_the_compile_cache_cold(run: Run, tmp_path: pathlib.Path) -> None:
    process = run("--ways", "restart,level2", "--restart-switches", "1", "--switches", "2")
    assert process.returncode == 0, process.stdout + process.stderr
    ways = result_of(tmp_path)["ways"]
    assert list(ways) == ["restart", "level2"]
    restart = ways["restart"]
    assert [start["model"] for start in restart["starts"]] == ["B", "A"]
    assert [switch["compile_cache_warm"] for switch in restart["switches"]] == [True]
    assert [sleep["level"] for sleep in ways["level2"]["first_sleeps"]] == [2, 2]


def test_other_tokens_fail_the_run_and_are_recorded(run: Run, tmp_path: pathlib.Path) -> None:
    broken = json.dumps({"forgets_at_sleep": 2})  # the first sleep after the one before the switches
    process = run("--ways", "vllm,level1", FAKE_BROKEN=broken, FAKE_BROKEN_WAY="vllm")
    assert process.returncode == 1
    assert "failed: vllm" in process.stderr
    assert "TOKENS DIFFER" in process.stdout
    ways = result_of(tmp_path)["ways"]
    assert ways["vllm"]["error"] == "tokens of A differ after switch 2"
    assert [switch["tokens_identical"] for switch in ways["vllm"]["switches"]].count(False) >= 1
    assert len(ways["vllm"]["switches"]) == 5
    assert ways["level1"]["error"] is None


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"dies_at_sleep": 3}, r"server [AB]: /sleep\?level=1: .*\n +\| last words"),
        ({"tokens_missing": 1}, r"server A: /v1/completions: 15 tokens instead of 16"),
    ],
)
def test_a_failing_server_loses_nothing_of_the_rest(
    run: Run, tmp_path: pathlib.Path, broken: dict[str, int], said: str
) -> None:
    """A killed server would hold its GPU here as none does in truth: the way that fails comes last."""
    process = run("--ways", "vllm,level1,level2", FAKE_BROKEN=json.dumps(broken), FAKE_BROKEN_WAY="layer")
    assert process.returncode == 1
    ways = result_of(tmp_path)["ways"]
    assert ways["vllm"]["error"] is None
    assert re.match(said, ways["level1"]["error"], re.DOTALL)
    assert ways["level2"]["error"] == "not reached: level1 failed"
    assert "failed: level1, level2" in process.stderr


@pytest.mark.parametrize(
    ("server", "options", "said"),
    [
        ("sh -c 'echo no luck; exit 3'", (), r"ended with status 3 before it was ready\n    \| no luck"),
        ("sh -c 'exec sleep 99'", ("--start-timeout", "0.2"), "not ready within 0 s"),
        ("sh -c 'exec sleep 99'", ("--deadline", "1"), "no time left"),
    ],
)
def test_servers_that_never_start(
    run: Run, tmp_path: pathlib.Path, server: str, options: tuple[str, ...], said: str
) -> None:
    process = run("--ways", "restart", "--server-command", server, *options)
    assert process.returncode == 1
    assert re.search(said, result_of(tmp_path)["ways"]["restart"]["error"])


def test_servers_end_with_the_benchmark(
    command: list[str], environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    process = subprocess.Popen(
        [*command, "--ways", "vllm", "--switches", "100000"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "A → B" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not list((tmp_path / "gpu").iterdir())
    assert result_of(tmp_path)["ways"]["vllm"]["error"] == f"SystemExit: {128 + signal.SIGTERM}"


def test_a_second_signal_does_not_cut_the_end_short(benchmark_module: Callable[[str], ModuleType]) -> None:
    """`timeout` sends two, and what a server started would stay, with the GPU's memory."""
    folder = pathlib.Path(str(benchmark_module("model_server").__file__)).parent
    program = (
        f"import os, sys, time; sys.path.insert(0, {str(folder)!r}); import model_server as m; m.exit_on_sigterm()\n"
        "try: os.kill(os.getpid(), 15); time.sleep(9)\n"
        "finally: os.kill(os.getpid(), 15); time.sleep(0.01); print('ended')"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (process.stdout, process.returncode) == ("ended\n", 143)


def test_processes_that_a_server_leaves_are_ended(
    benchmark_module: Callable[[str], ModuleType], tmp_path: pathlib.Path
) -> None:
    module = benchmark_module("model_server")
    pid_file = tmp_path / "pid"
    left = 'trap "" TERM; echo $$ >"$0"; exec sleep 99'
    program = f"trap 'exit 0' TERM; sh -c '{left}' \"$0\" & wait"
    server = module.Server("A", ["sh", "-c", program, str(pid_file)], 9, {}, tmp_path / "log", module.Deadline(300))
    server._is_healthy = lambda: pid_file.exists() and pid_file.read_text().endswith("\n")
    server.start(300)
    assert server.stop(0.3) >= 0.3
    stat = pathlib.Path(f"/proc/{int(pid_file.read_text())}/stat")
    for _ in range(1000):
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            break
        if state in "ZX":
            break
        time.sleep(0.05)
    else:
        pytest.fail("it still runs")
    assert server.stop() == 0.0, "it has been stopped"


def test_ways_and_models_are_checked(run: Run) -> None:
    for options, said in (
        (("--ways", "vllm,level3"), "unknown ways: level3"),
        (("--models", "8B"), "two of"),
        (("--load-format", "dummy"), "dummy weights are nowhere"),
    ):
        process = run(*options)
        assert process.returncode == 2
        assert said in process.stderr


# Checkpoints


def test_checkpoints_have_the_names_and_values_of_the_shape(
    benchmark_module: Callable[[str], ModuleType], tmp_path: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    checkpoints = benchmark_module("checkpoints")
    shape = checkpoints.SHAPES["tiny"]
    models = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        assert not checkpoints.is_written(folder, shape, seed)
        checkpoints.write_checkpoint(folder, shape, seed)
        assert checkpoints.is_written(folder, shape, seed)
        assert not checkpoints.is_written(folder, shape, seed + 1)
        index = json.loads((folder / checkpoints.INDEX).read_text())
        tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
        assert tensors.keys() == index["weight_map"].keys()
        assert sum(2 * tensor.numel() for tensor in tensors.values()) == shape.weights_bytes
        models.append(tensors)
    query = "model.layers.1.self_attn.q_proj.weight"
    assert models[0][query].dtype == torch.bfloat16
    assert models[0][query].shape == (256, 256)
    assert models[0][query].float().std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(models[0][query], models[1][query])
    assert not torch.equal(models[0][query], models[0]["model.layers.0.self_attn.q_proj.weight"])
    assert models[0]["model.norm.weight"].eq(1).all()


def test_sizes_of_the_shapes(benchmark_module: Callable[[str], ModuleType]) -> None:
    shapes = benchmark_module("checkpoints").SHAPES
    sizes = {name: round(shape.weights_bytes / (1 << 30), 2) for name, shape in shapes.items() if name != "tiny"}
    assert sizes == {"0.6B": 1.11, "8B": 15.26, "14B": 27.51, "32B": 61.02, "MoE": 1.27, "windows": 6.53}
    assert "lm_head.weight" not in shapes["0.6B"].shards()["model-outer.safetensors"]


def test_the_page_cache_is_asked(benchmark_module: Callable[[str], ModuleType], tmp_path: pathlib.Path) -> None:
    cached_fraction = benchmark_module("switching").cached_fraction
    (tmp_path / "new").write_bytes(os.urandom((1 << 20) + 1))
    assert cached_fraction([tmp_path / "new"]) == 1.0
    assert cached_fraction([]) == 0.0


# The table, the plot and the README's figures


@pytest.fixture
def results(run: Run, tmp_path: pathlib.Path) -> dict[str, Any]:
    """As if measured: an eightfold first restart, cold; all times known."""
    process = run("--ways", "vllm,level2,restart", "--switches", "3", "--restart-switches", "3")
    assert process.returncode == 0, process.stdout + process.stderr
    result = result_of(tmp_path)
    result["machine"] = {"gpu": "A GPU", "driver": "580.1", "cores": 16, "torch": "2.11.0", "vllm": "0.26.0"}
    for name, seconds in (("vllm", 2.0), ("level2", 4.0), ("restart", 40.0)):
        for number, switch in enumerate(result["ways"][name]["switches"]):
            switch["switch_s"] = seconds * (1 + number / 10)
            switch["total_s"] = switch["switch_s"] + 1
    result["ways"]["restart"]["switches"][0].update(switch_s=320.0, compile_cache_warm=False)
    result["ways"]["vllm"]["error"] = "server A: no luck\n    | last words"
    result["ways"]["vllm fp8"] = {**result["ways"]["vllm"], "quantization": "fp8", "switches": [], "first_sleeps": []}
    result["ways"]["restart"]["machine"] = {"command": "another"}
    return result


def test_the_table_counts_only_restarts_that_did_not_compile(
    results: dict[str, Any], benchmark_module: Callable[[str], ModuleType]
) -> None:
    lines = benchmark_module("measured.switching").table(results)
    assert "| switch | 46.0 (44.0–48.0) | 2.20 (2.00–2.40) | 4.40 (4.00–4.80) |" in lines
    assert "| switch, faster than restart | – | 20.9 × | 10.5 × |" in lines
    assert "| switches | 2 | 3 | 3 |" in lines
    assert "A switch between the same models in FP8: not measured with vLLM's sleep mode, level 1." in lines
    text = "\n".join(lines)
    assert "A = Qwen3-tiny, 0.0 GiB and B = Qwen3-tiny" in text
    assert "the page cache held 100% of what" in text
    vllm, level2 = "vLLM's sleep mode, level 1", "cumem-sleep, level 2 (bf16)"
    assert f"First sleeps were prepared (`CUMEM_SLEEP_PREPARE=1`): {level2}." in text
    assert text.endswith(
        f" Measured in 2 runs, on machines with such a GPU."
        f" {vllm} (bf16) failed: server A: no luck. {vllm} (fp8) failed: server A: no luck."
    )


def test_plot_and_check(
    results: dict[str, Any],
    benchmark_module: Callable[[str], ModuleType],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    tables = benchmark_module("result_tables")
    (tmp_path / "switching.json").write_text(json.dumps(results))
    for path in (BENCHMARKS / "results").glob("*.json"):
        if path.name != "switching.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "docs").mkdir()
    for page, blocks in tables.BLOCKS.items():
        (tmp_path / page).write_text("\n".join(mark for name in blocks for mark in tables.marks(name)) + "\n")
    monkeypatch.setattr(tables.results, "ROOT", tmp_path)
    monkeypatch.setattr(tables.results, "RESULTS", tmp_path)
    monkeypatch.setattr(tables.peers, "PLOT", tmp_path / "docs" / "peers.svg")
    monkeypatch.setattr(tables.switching, "PLOT", tmp_path / "docs" / "switching.svg")
    monkeypatch.setattr(sys, "argv", ["result_tables.py"])
    tables.main()
    assert "Two models on one GPU, switched" in (tmp_path / "docs" / "benchmarks.md").read_text()
    readme = (tmp_path / "README.md").read_text()
    head = "| restart | vLLM's sleep mode, level 1 | cumem-sleep, level 2 |"
    assert f"{head}\n|---|---|---|\n| 46.0 | 2.20 | 4.40 |\n" in readme
    (tmp_path / "README.md").write_text(readme.replace("46.0", "47.0"))
    monkeypatch.setattr(sys, "argv", ["result_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"README\.md: its figures"):
        tables.main()
    (tmp_path / "README.md").write_text(readme)
    assert "first token after it" in tables.switching.PLOT.read_text()
    monkeypatch.setattr(sys, "argv", ["result_tables.py", "--check"])
    tables.main()
    tables.switching.PLOT.write_text("<svg/>")
    with pytest.raises(SystemExit, match=r"switching\.svg: not made from"):
        tables.main()


def test_the_next_way_begins_where_an_even_number_of_switches_ended(run: Run, tmp_path: pathlib.Path) -> None:
    process = run("--ways", "level1,level2", "--switches", "2")
    assert process.returncode == 0, process.stdout + process.stderr
    ways = result_of(tmp_path)["ways"]
    assert [switch["reload_s"] is not None for switch in ways["level2"]["switches"]] == [True, True]


def test_a_vault_serves_both_models(run: Run, tmp_path: pathlib.Path) -> None:
    process = run("--ways", "vault", "--switches", "1", CUMEM_SLEEP_DRIVER="sim")
    assert process.returncode == 0, process.stdout + process.stderr
    way = result_of(tmp_path)["ways"]["vault"]
    assert [sleep["model"] for sleep in way["first_sleeps"]] == ["A", "B"]
    assert "the vault has its memory" in process.stdout
    assert (tmp_path / "gpu").is_dir()
    assert not list((tmp_path / "gpu").iterdir())


# One model: vllm_serve.py


def serve(environment: dict[str, str], tmp_path: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    server = f"{sys.executable} {TESTS / 'fake_model_server.py'}"
    command = [sys.executable, str(BENCHMARKS / "vllm_serve.py"), "--out", str(tmp_path / "serve.json")]
    command += [
        "--shape",
        "tiny",
        "--work",
        str(tmp_path / "work"),
        "--rounds",
        "1",
        "--pause",
        "0",
        "--port",
        str(two_free_ports()),
    ]
    return subprocess.run(
        [*command, "--server-command", server, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_serving_is_measured_and_later_runs_add_theirs(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    for ways in ("cold,vllm", "prepared,compressed"):
        process = serve(environment, tmp_path, "--ways", ways)
        assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads((tmp_path / "serve.json").read_text())
    assert result["machine"]["simulated"]
    assert list(result["ways"]) == ["cold", "vllm", "prepared", "compressed"]
    assert [way.get("bytes_of_normal_values") for way in result["ways"].values()] == [None, None, None, 1 << 20]
    for way in result["ways"].values():
        assert way["tokens_identical"]
        assert (len(way["first_sleep_s"]), len(way["later_sleeps_s"]), len(way["wakes_s"])) == (1, 1, 2)
    assert "status" not in result["ways"]["vllm"]
    assert result["ways"]["prepared"]["status"]["usage"]["weights"]["backed_up_bytes"] == 2


def test_serving_through_a_vault(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    simulated = {**environment, "CUMEM_SLEEP_DRIVER": "sim"}
    process = serve(simulated, tmp_path, "--ways", "vault,vault_compressed")
    assert process.returncode == 0, process.stdout + process.stderr
    for name, way in json.loads((tmp_path / "serve.json").read_text())["ways"].items():
        assert way["tokens_identical"]
        assert way["environment"]["CUMEM_SLEEP_VAULT"].endswith("vault.sock")
        assert way["vault"]["pinned_bytes"] == way["vault"]["memory_bytes"]
        assert way.get("bytes_of_normal_values") == (None if name == "vault" else 1 << 20)


def test_other_tokens_after_a_wake_fail_and_the_next_way_is_measured(
    environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    broken = {**environment, "FAKE_BROKEN": json.dumps({"forgets_at_sleep": 2}), "FAKE_BROKEN_WAY": "layer"}
    process = serve(broken, tmp_path, "--ways", "cold,vllm")
    assert process.returncode == 1
    ways = json.loads((tmp_path / "serve.json").read_text())["ways"]
    assert "other tokens after wake 2" in ways["cold"]["error"]
    assert ways["vllm"]["tokens_identical"]


def test_a_way_that_fails_leaves_what_an_earlier_run_found(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    assert serve(environment, tmp_path, "--ways", "cold").returncode == 0
    before = json.loads((tmp_path / "serve.json").read_text())["ways"]
    broken = {**environment, "FAKE_BROKEN": json.dumps({"forgets_at_sleep": 2}), "FAKE_BROKEN_WAY": "layer"}
    process = serve(broken, tmp_path, "--ways", "cold")
    assert process.returncode == 1
    assert "FAILED" in process.stdout
    assert json.loads((tmp_path / "serve.json").read_text())["ways"] == before


def test_a_way_of_serving_that_does_not_exist(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    process = serve(environment, tmp_path, "--ways", "cold,hot")
    assert process.returncode == 2
    assert "--ways: hot: no such way; there are cold, touched, prepared, compressed, vllm" in process.stderr
