"""What ran with which engine and version, from what shows it: the tables of docs/support.md.

A cell is made from the first of these that there is: code that refuses, raw results of a GPU, a test on the simulated
driver that `.ci/run` runs with that version. Evidence that is gone, or says that something failed, is an error.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cumem_sleep.vllm import compatibility, kept_kv

ROOT = Path(__file__).parent.parent
EARLIER = "8d3b3c0"  # the commit of results whose scripts are gone


def minor(version: str) -> str:
    """0.33 of 0.33.0."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class Ran:
    """Raw results of a GPU: a file of benchmarks/results, and where in it."""

    file: str
    place: Sequence[str] = ()

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        """What was recorded there, and on which machine."""
        path = ROOT / "benchmarks" / "results" / self.file
        try:
            whole: dict[str, Any] = json.loads(path.read_text())
            found: dict[str, Any] = functools.reduce(lambda part, key: part[key], self.place, whole)
        except (OSError, KeyError) as error:
            raise SystemExit(f"docs/support.md: no result {self.file} {list(self.place)} ({error!r})") from None
        if found.get("failed") or found.get("wrong") or not found.get("passed", True):
            raise SystemExit(f"docs/support.md: {self.file} {list(self.place)} says that it failed")
        return {"machine": whole.get("machine")} | found

    def version(self, engine: str) -> str:
        """The engine's, as the result names it."""
        return str(self.result["machine"][engine]).partition("+")[0]

    @property
    def link(self) -> str:
        """The GPU, linked to the result."""
        machine = self.result["machine"]
        if machine.get("simulated") or not machine["gpu"].startswith("NVIDIA "):
            raise SystemExit(f"docs/support.md: {self.file} is of no GPU")
        return f"[{machine['gpu'].split()[1]}](../benchmarks/results/{self.file})"


@dataclass(frozen=True)
class Earlier:
    """A raw result of a GPU that is no longer here: its script is gone."""

    file: str
    gpu: str = "H200"

    @property
    def link(self) -> str:
        """The GPU, and where the result is."""
        return f"{self.gpu} at {EARLIER}"


@dataclass(frozen=True)
class Tested:
    """A test of tests/ on the simulated driver; `says`: or one that shows a refusal."""

    file: str
    name: str
    says: str = "simulator"

    @functools.cached_property
    def oldest(self) -> tuple[int, int]:
        """The oldest vLLM for which neither the test nor its file skips itself."""
        text = (ROOT / "tests" / self.file).read_text() if (ROOT / "tests" / self.file).is_file() else ""
        tree = ast.parse(text)
        test = next((node for node in ast.walk(tree) if getattr(node, "name", "") == self.name), None)
        if test is None:
            raise SystemExit(f"docs/support.md: no test {self.name} in tests/{self.file}")
        parts = [test, *(node for node in tree.body if isinstance(node, (ast.If, ast.Expr)))]
        source = "\n".join(ast.get_source_segment(text, part) or "" for part in parts)
        return max(
            ((int(a), int(b)) for a, b in re.findall(r"(?:< |skip_vllm_before\()\((\d+), (\d+)\)", source)),
            default=(0, 0),
        )

    def runs_with(self, version: str) -> bool:
        """Whether `.ci/run` runs it with this vLLM."""
        is_of_newest = self.file.removeprefix("vllm/test_gate_").removesuffix(".py") in _only_newest()
        numbers = tuple(map(int, minor(version).split(".")))
        return numbers >= self.oldest and version in vllm_versions()[-1 if is_of_newest else 0 :]

    @property
    def link(self) -> str:
        """What it shows, linked to its file."""
        assert self.oldest >= (0, 0)  # it is there
        return f"[{self.says}](../tests/{self.file})"


@functools.cache
def _ci() -> str:
    return (ROOT / ".ci" / "run").read_text()


def vllm_versions() -> list[str]:
    """Those whose tests `.ci/run` runs."""
    return re.findall(r" versions=\(([\d. ]+)\)", _ci())[0].split()  # type: ignore[no-any-return]


def _only_newest() -> set[str]:
    """Files of tests that `.ci/run` leaves out with older versions."""
    return {name for names in re.findall(r" own_app\+?=\(([\w ]+)\)", _ci()) for name in names.split()}


def _scenarios(*names: str) -> tuple[Ran, ...]:
    return tuple(Ran("vllm_scenarios.json", ("scenarios", name)) for name in names)


def _of_newest(*names: str) -> tuple[Ran, ...]:
    return tuple(Ran("vllm_scenarios_0.33.json", ("scenarios", name)) for name in names)


def _survived(*names: str) -> tuple[Ran, ...]:
    files = {"surviving_vllm_0.26.json": names, "surviving_vllm_0.33.json": names}
    return tuple(Ran(file, ("scenarios", f"survives_{name}")) for file, names in files.items() for name in names)


@dataclass(frozen=True)
class WithVllm:
    """A feature of the plugin, the gate or the front."""

    name: str
    ran: tuple[Ran, ...] = ()
    test: Tested | None = None
    earlier: Earlier | None = None  # with vLLM 0.26.0
    versions: Sequence[str] = field(default=())  # if any, others are refused ...
    refused_in: str = ""  # ... in this file

    def cell(self, version: str) -> str:
        """Of the table: with this vLLM."""
        if compatibility.version_misfit(version):
            return "[refused](../cumem_sleep/vllm/compatibility.py)"
        if self.versions and minor(version) not in self.versions:
            return f"[refused](../{self.refused_in})"
        if ran := [each for each in self.ran if each.version("vllm") == version]:
            return _links(ran)
        if self.earlier and version == "0.26.0":
            return _links(self.earlier)
        return _links(self.test if self.test and self.test.runs_with(version) else None)


WITH_VLLM = (
    WithVllm("levels 1 and 2", _survived("dense"), Tested("vllm/test_worker.py", "test_level_2")),
    WithVllm(
        "level 3",
        (Ran("vllm_level_3_own.json"), *_of_newest("level_3_with_little_memory")),
        Tested("vllm/test_worker_level_3.py", "test_from_awake"),
    ),
    WithVllm(
        "level 3, several workers", test=Tested("vllm/test_worker_level_3.py", "test_several_ranks", says="refused")
    ),
    WithVllm(
        "tensor and pipeline parallelism",
        (*_scenarios("ranks_agree", "pipeline_parallel_2"), *_survived("tensor_parallel")),
        Tested("vllm/test_engine_group.py", "test_all_workers_of_an_engine_or_none"),
    ),
    WithVllm(
        "data parallelism",
        _scenarios("data_parallel_2"),
        Tested("vllm/test_engine_group.py", "test_all_workers_of_an_engine_or_none"),
    ),
    WithVllm("Ray", earlier=Earlier("vllm_scenarios.json", "H100")),
    WithVllm("FP8, LoRA, a draft model", _survived("fp8_static", "lora", "draft_model")),
    WithVllm("compressed backups", (Ran("vllm_serve.json", ("ways", "compressed")),)),
    WithVllm(
        "the vault",
        (
            *_scenarios("two_servers_through_the_vault"),
            *_of_newest("two_servers_through_the_vault", "tensor_parallel_2_through_the_vault"),
        ),
        Tested("vllm/test_worker.py", "test_through_the_vault"),
    ),
    WithVllm(
        "a KV cache that survives",
        ran=(Ran("vllm_kept_kv.json"), Ran("vllm_kept_kv_tensor_parallel.json"), Ran("vllm_kept_kv_0.33.json")),
        test=Tested("vllm/test_kept_kv.py", "test_each_way_to_keep_and_to_lose_it"),
        versions=kept_kv.VERSIONS,
        refused_in="cumem_sleep/vllm/kept_kv.py",
    ),
    WithVllm(
        "the gate",
        test=Tested("vllm/test_random_gate.py", "test_nothing_runs_on_memory_that_is_not_there"),
        earlier=Earlier("vllm_scenarios.json"),
    ),
    WithVllm(
        "no development mode",
        (Ran("serve_models_usual_options.json"),),
        Tested("vllm/test_served_controls.py", "test_it_sleeps_without_development_mode"),
    ),
    WithVllm("idle sleep", test=Tested("vllm/test_idle_episodes.py", "test_it_sleeps_in_time_and_under_no_request")),
    WithVllm("`cumem-sleep serve`", (Ran("serve_models.json"),)),
)

_CALLS = "integrations/test_trainers_calls.py"
TRAINERS = "slime, miles, verl"
ENGINES = ("PyTorch", "torch_memory_saver", "SGLang", TRAINERS, "TRL")
WITH_OTHERS: dict[str, dict[str, Ran | Earlier | Tested | Sequence[Tested]]] = {
    "sleep and wake": {
        "PyTorch": Earlier("decoder.json"),
        "torch_memory_saver": Earlier("saver.json"),
        "SGLang": Ran("sglang_cycles.json", ("ways", "ours")),
        "TRL": Earlier("trl_colocated.json"),
        TRAINERS: (
            Tested(_CALLS, "test_buffers_of_deep_ep_are_left_out"),
            Tested(_CALLS, "test_gradients_are_dropped_and_parameters_stay_for_the_update"),
            Tested(_CALLS, "test_release_and_resume_memory_occupation"),
        ),
    },
    "training": {
        "torch_memory_saver": Earlier("saver.json"),
        "TRL": Earlier("trl_colocated.json"),
    },
    "compressed backups": {
        "PyTorch": Ran("vault.json", ("ways", "compressed")),
        "SGLang": Earlier("sglang_cycles_special.json"),
    },
    "the vault": {
        "PyTorch": Ran("vault.json", ("ways", "vault")),
        "torch_memory_saver": Earlier("saver.json"),
        "SGLang": Earlier("sglang_cycles_special.json"),
    },
    "level 3": {"PyTorch": Ran("bench_level_3.json")},
    "several ranks": {
        "PyTorch": Tested("operations/test_agreement.py", "test_a_group_of_torch_distributed"),
        "SGLang": Earlier("sglang_cycles_tensor_parallel.json"),
    },
    "kept ranges": {"PyTorch": Earlier("kept_ranges.json")},
    "backups on disk": {
        "PyTorch": Earlier("vault_spill.json"),
        "torch_memory_saver": Tested(
            "integrations/test_torch_memory_saver.py", "test_disk_backups_go_to_a_vault_that_spills"
        ),
    },
}


def _links(evidence: Ran | Earlier | Tested | Sequence[Ran | Tested] | None) -> str:
    """Of all of it, each once."""
    if evidence is None:
        return "unknown"
    each = [evidence] if isinstance(evidence, (Ran, Earlier, Tested)) else evidence
    return ", ".join(sorted({one.link for one in each}))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")


def _versions() -> dict[str, str]:
    """Of other engines, as far as a result or `.ci/run` names them; docs/torch-memory-saver.md names the rest."""
    ran = {one.version("torch") for shown in WITH_OTHERS.values() if isinstance(one := shown.get("PyTorch"), Ran)}
    return {
        "PyTorch": ", ".join(sorted(ran)),
        "torch_memory_saver": "0.0.10",
        "SGLang": str(Ran("sglang_cycles.json", ("ways", "ours")).result["sglang"]),
    }


def tables() -> dict[str, str]:
    """By their headings."""
    versions, of_others = vllm_versions(), _versions()
    of_vllm = [[feature.name, *(feature.cell(version) for version in versions)] for feature in WITH_VLLM]
    others = [[name, *(_links(shown.get(engine)) for engine in ENGINES)] for name, shown in WITH_OTHERS.items()]
    head = ["", *(f"{engine} {of_others.get(engine, '')}".rstrip() for engine in ENGINES)]
    return {"vLLM": _table(["", *versions], of_vllm), "Other engines": _table(head, others)}
