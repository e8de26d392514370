"""`benchmarks/on_gpu_host.sh` with a `python3` that only notes what it is asked: what it builds, unpacks and runs."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys
import tarfile

import pytest

import cumem_sleep

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "on_gpu_host.sh"
pytestmark = pytest.mark.sim

PYTHON = """#!/bin/bash
words=$(printf '%q ' "$@")
echo "${words% }" >>"$CALLS"
case "$*" in *"$FAILS"*) exit 1 ;; *" shim "*) echo /shim ;; esac
"""


@pytest.fixture
def host(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkout, and the programs that such a host has."""
    for folder in ("checkout/csrc", "checkout/cumem_sleep", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("csrc/a.cpp", "cumem_sleep/a.py", "setup.py", "pyproject.toml"):
        (tmp_path / "checkout" / name).write_text(name)
    for name, text in (("python3", PYTHON), ("nvidia-smi", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(host: pathlib.Path, *parts: str, fails: str = "nothing", **variables: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and what Python was asked."""
    calls = host / "calls"
    calls.write_text("")
    path = f"{host / 'bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        ["bash", str(SCRIPT), str(host / "out"), *parts],
        cwd=host / "checkout",
        env={**os.environ, "PATH": path, "CALLS": str(calls), "FAILS": fails, "SITE": str(host / "site"), **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr, calls.read_text().splitlines()


def test_it_builds_once_for_each_state_of_the_sources(host: pathlib.Path) -> None:
    builds = [[call for call in run(host)[2] if "pip install" in call] for _ in range(2)]
    assert [len(calls) for calls in builds] == [1, 0]
    (host / "checkout" / "cumem_sleep" / "a.py").write_text("changed")
    assert any("pip install" in call for call in run(host)[2])
    status, _, _ = run(host, "vault", fails="pip install", SITE=str(host / "other"))
    assert status == 1


def test_it_installs_a_wheel_of_these_sources_and_of_no_others(host: pathlib.Path) -> None:
    _, said, calls = run(host)
    assert calls[-1].endswith(" .")
    (sources,) = (line.split()[-1] for line in said.splitlines() if line.startswith("== sources"))
    wheel = host / "checkout" / ".gpu" / "wheel" / sources / "cumem_sleep-1-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert run(host, SITE=str(host / "other"))[2][-1].endswith(f" .gpu/wheel/{sources}/{wheel.name}")
    (host / "checkout" / "csrc" / "a.cpp").write_text("changed")
    assert run(host, SITE=str(host / "third"))[2][-1].endswith(" .")


def test_joined_parts_run_each_on_a_gpu_of_its_own_and_none_loses_the_other(host: pathlib.Path) -> None:
    """Each of the two waits for the other to begin."""
    (host / "bin" / "python3").write_text(
        '#!/bin/bash\ncase "$1" in *.py) ;; *) exit 0 ;; esac\n'
        'echo "GPU $CUDA_VISIBLE_DEVICES"; echo "$1 $CUDA_VISIBLE_DEVICES" >>"$CALLS"\n'
        'until [ "$(wc -l <"$CALLS")" -ge 2 ]; do sleep 0.05; done\n'
        'case "$1" in *"$FAILS"*) exit 1 ;; esac\n'
    )
    status, said, calls = run(host, "vault_kills+first_clients")
    assert (status, sorted(calls)) == (0, ["benchmarks/vault_first_clients.py 1", "benchmarks/vault_kills.py 0"])
    assert [line for line in said.splitlines() if line.startswith(("--", "GPU"))] == [
        *("-- vault_kills", "GPU 0"),
        *("-- first_clients", "GPU 1"),
    ]
    for fails in ("kills", "first_clients"):
        status, said, calls = run(host, "vault_kills+first_clients", fails=fails)
        assert (status, len(calls)) == (1, 2)
        assert said.count("GPU") == 2
    calls = run(host, "vault_kills,level_3+first_clients,ranks")[2]
    assert [call for call in calls if call.endswith(" 1")] == [
        "benchmarks/vault_first_clients.py 1",
        "benchmarks/vllm_scenarios.py 1",
    ]


def test_what_is_carried_in_several_calls_is_unpacked_once_each(host: pathlib.Path) -> None:
    for part in ("1", "2"):
        folder = host / "checkout" / ".gpu" / part
        folder.mkdir(parents=True)
        (folder / "content").write_text(part)
        with tarfile.open(folder / f"of_{part}.tar.xz", "w:xz") as archive:
            archive.add(folder / "content", f"content_{part}")
        assert run(host)[0] == 0
        assert (host / "site_of_vllm" / f"content_{part}").read_text() == part
    (host / "site_of_vllm" / "content_1").unlink()
    assert run(host)[0] == 0
    assert not (host / "site_of_vllm" / "content_1").exists()


def test_the_suite_does_not_see_what_vllm_brings(host: pathlib.Path) -> None:
    """With its packages it would test more than fits a call."""
    (host / "bin" / "python3").write_text('#!/bin/bash\necho "${PYTHONPATH//*of_vllm*/vLLM} $1 $2" >>"$CALLS"\n')
    calls = run(host, "ranks", "vault_tests", COMMIT="c0ffee")[2]
    assert [call for call in calls if call.endswith((" --out", " -m pytest"))] == [
        "vLLM benchmarks/vllm_scenarios.py --out",
        f"{host / 'site'}:{host / 'checkout'}/benchmarks -m pytest",
    ]


CRASHES = """#!/bin/bash
case "$*" in *"-m pytest"*) ;; *) exit 0 ;; esac
echo pytest >>"$CALLS"
turn=$(wc -l <"$CALLS")
if [ "$turn" -le "$GOOD" ]; then echo "test_$turn" >>"$CUMEM_SLEEP_TEST_BEGUN"; fi
if [ "$turn" -le "$FAILS" ]; then kill -SEGV $$; fi
echo "turn $turn passed"
"""


@pytest.mark.parametrize(
    ("good", "fails", "turns", "status"), [(1, 0, 1, 0), (2, 1, 2, 1), (4, 3, 4, 1), (0, 9, 1, 1), (1, 9, 2, 1)]
)
def test_a_crash_in_the_suite_costs_one_test(
    host: pathlib.Path, good: int, fails: int, turns: int, status: int
) -> None:
    """A crash before any test ends it."""
    (host / "bin" / "python3").write_text(CRASHES)
    result, said, calls = run(host, "tests", COMMIT="c0ffee", GOOD=str(good), fails=str(fails))
    assert (result, calls) == (status, ["pytest"] * turns)
    crashes = [line for line in said.splitlines() if line.startswith("ENDED BY SIGNAL")]
    assert crashes == [f"ENDED BY SIGNAL 11 in test_{n}. What follows it:" for n in range(1, min(good, fails) + 1)]
    assert (f"turn {turns} passed" in said) == (turns > fails)


def test_the_suite_does_not_begin_when_no_time_is_left(host: pathlib.Path) -> None:
    status, said, calls = run(host, "vault_tests", COMMIT="c0ffee", LIMIT_S="0")
    assert status == 1
    assert "NOT RUN, no time is left" in said
    assert not any("-m pytest" in call for call in calls)


@pytest.mark.parametrize("parts", ["vault_tests", "vault_tests+first_clients"])
def test_a_suite_whose_time_is_over_says_what_it_knows(host: pathlib.Path, parts: str) -> None:
    (host / "bin" / "python3").write_text(
        "#!/bin/bash\n"
        'case "$*" in *"-m pytest"*) ;; *) exit 0 ;; esac\n'
        "trap 'echo \"this has failed\"; exit 2' INT\n"
        "while true; do sleep 0.1; done\n"
    )
    status, said, _ = run(host, parts, COMMIT="c0ffee", LIMIT_S="8")
    assert status == 1
    assert "this has failed" in said


def test_a_run_of_the_suite_goes_on_behind_what_has_begun(tmp_path: pathlib.Path) -> None:
    """What is left out there is not left out by a pytest that a test starts."""
    begun, kept = tmp_path / "begun", tmp_path / "kept"
    (tmp_path / "left.py").write_text(
        "import os, pathlib\n"
        "def pytest_sessionfinish():\n"
        f"    pathlib.Path({str(kept)!r}).write_text(os.environ.get('CUMEM_SLEEP_TEST_BEGUN', 'nothing'))\n"
    )
    tests = SCRIPT.parent.parent / "tests" / "transfer" / "test_engine_or_kernel.py"

    def outcome() -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "left", str(tests)]
        done = subprocess.run(
            command,
            cwd=SCRIPT.parent.parent,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "CUMEM_SLEEP_TEST_BEGUN": str(begun)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return done.stdout.splitlines()[-1]

    first = outcome()
    names = begun.read_text().splitlines()
    assert f"{len(names)} passed" in first
    assert len(names) > 3
    begun.write_text("\n".join(names[:-2]) + "\n")
    assert f"2 passed, {len(names) - 2} deselected" in outcome()
    assert begun.read_text().splitlines() == names
    assert kept.read_text() == "nothing"


PARTS = {
    "peers": "benchmarks/peers.py",
    "vault": "benchmarks/vault.py",
    "vault_small": "benchmarks/vault.py",
    "vault_kills": "benchmarks/vault_kills.py",
    "vault_servers": "benchmarks/vllm_scenarios.py",
    "ranks": "benchmarks/vllm_scenarios.py",
    "first_clients": "benchmarks/vault_first_clients.py",
    "links": "benchmarks/vault_links.py",
    "manners": "benchmarks/vault_links.py",
    "spill": "benchmarks/vault_spill.py",
    "kept_kv": "benchmarks/vllm_kept_kv.py",
    "kept_kv_windows": "benchmarks/vllm_kept_kv.py",
    "serve": "benchmarks/vllm_serve.py",
    "serve_vault": "benchmarks/vllm_serve.py",
    "serve_level_3": "benchmarks/vllm_level_3.py",
    "serve_level_3_own": "benchmarks/vllm_level_3.py",
    "models": "benchmarks/serve_models.py",
    "serve_kept_kv": "benchmarks/serve_kept_kv.py",
    "switching_vault": "benchmarks/switching.py",
    "trl": "benchmarks/trl_colocated.py",
    "sglang": "benchmarks/sglang_cycles.py",
    "saver": "benchmarks/torch_memory_saver_beside.py",
    "saver_30": "benchmarks/torch_memory_saver_beside.py",
}


GIVEN = {
    "ranks": ("ONLY", "data_parallel_2"),
    "serve_level_3": ("LEVEL_3_OPTIONS", "--deadline 330"),
    "spill": ("SPILL_OPTIONS", "--ways files --decoder-layers 9"),
    "kept_kv": ("KEPT_KV_OPTIONS", "--shape 8B --tokens 16000 --rounds 1"),
    "trl": ("TRL_OPTIONS", "--steps 10 --graphs"),
    "sglang": ("SGLANG_OPTIONS", "--shape 0.6B --ways ours-graphs"),
    "models": ("MODELS_OPTIONS", "--requests 100 --restart-seconds 60"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("part", "script"), PARTS.items())
def test_options_are_those_that_scripts_take(host: pathlib.Path, part: str, script: str) -> None:
    variable, given = GIVEN.get(part, ("ONLY", ""))
    (host / "site_of_sglang" / "site").mkdir(parents=True)
    status, said, calls = run(host, part, **{variable: given})
    assert status == 0, said
    (call,) = (call for call in calls if call.startswith(script))
    assert call.endswith(given)
    help_text = subprocess.run(
        [sys.executable, str(SCRIPT.parent.parent / script), "--help"],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(cumem_sleep.__path__[0]).parent)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    ).stdout
    options = [word.partition("=")[0] for word in shlex.split(call) if word.startswith("--")]
    assert all(option in help_text for option in options)


def test_a_part_that_fails_loses_none_of_the_others(host: pathlib.Path) -> None:
    status, said, calls = run(
        host, "vault", "nonsense", "vault_kills", "saver_tests", fails="vault.py", COMMIT="c0ffee"
    )
    assert status == 1
    assert "unknown: nonsense" in said
    assert [call.split()[0] for call in calls if call.startswith("benchmarks")] == [
        "benchmarks/vault.py",
        "benchmarks/vault_kills.py",
    ]
    assert "commit c0ffee" in (host / "out" / "saver_tests.txt").read_text()
    assert (host / "out" / "logs.tar.gz").is_file()
    assert not (host / "out" / "logs").exists()


def test_a_part_takes_what_else_it_is_told(host: pathlib.Path) -> None:
    _, _, calls = run(host, "saver_30", "vault", SAVER_OPTIONS="--ways ours", VAULT_OPTIONS="--ways together")
    asked = [call.partition(" ")[::2] for call in calls if call.startswith("benchmarks/")]
    assert [(script, options.partition("--ways ")[2]) for script, options in asked] == [
        ("benchmarks/torch_memory_saver_beside.py", "ours"),
        ("benchmarks/vault.py", "together"),
    ]


def test_what_does_not_fit_any_more_says_so(host: pathlib.Path) -> None:
    status, said, calls = run(host, "vault", "models", LIMIT_S="35")
    assert status == 1
    assert said.count("NOT RUN, too little time is left") == 2
    assert not [call for call in calls if call.startswith("benchmarks")]


def test_shares_of_the_suite_are_all_of_it(host: pathlib.Path) -> None:
    files = [f"tests/test_{letter}.py" for letter in "abcdefg"]
    (host / "checkout" / "tests" / "vault").mkdir(parents=True)
    for file in [*files, "tests/vault/test_its_own_part.py"]:
        (host / "checkout" / file).touch()
    _, _, calls = run(host, "tests_1_of_3", "tests_2_of_3", "tests_3_of_3", COMMIT="abc")
    given = [[word for word in call.split() if word.startswith("tests/")] for call in calls if " pytest " in call]
    assert given == [files[0::3], files[1::3], files[2::3]]
