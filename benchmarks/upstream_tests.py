"""vLLM's own tests of sleep mode, from a checkout of vLLM, with this layer and without it. Nothing is fetched.

    python benchmarks/upstream_tests.py CHECKOUT --out result.json --parts cumem,backends --compare

Of the checkout only its folder `tests` is used; the vLLM is the installed one, which should be of the same version. The
models have the names that the tests ask for, random weights and a tokenizer of single bytes: they are made here, in a
cache of Hugging Face's form. What failed with this layer runs again without it (`--compare`): a failure there is
upstream's, or that of the machine or the model. With --gpus several jobs run at once, each on a GPU of its own.

Ways: `cumem_sleep` (`--sleep-mode-backend cumem_sleep`), `default` (vLLM's backend `cumem`, which uses this layer,
too), `without` (CUMEM_SLEEP_DISABLE=1), `gate` and `gate_wait` (servers whose gate refuses or holds requests).
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import SHAPES, write_checkpoint
from ending import kill_descendants
from record import machine_apart

VARIABLE = "UPSTREAM_TESTS"  # tells this file, as a plugin of pytest, how the run is to be
SETTINGS: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
USUAL_PORT = 8770  # of the servers in vLLM's tests/entrypoints/rl
VOCABULARY = 1024  # of the small models
LEAST_S = 60.0  # for starting pytest at all

Run = dict[str, Any]  # outcome, seconds, why


class Part(NamedTuple):
    """A file of tests: where versions of vLLM have it, pytest's expression for each job, whether it starts servers."""

    paths: tuple[str, ...]
    jobs: tuple[str, ...] = ("",)
    servers: bool = False


_ISOLATED = "TestPhysicalMemory or TestSleepWakeLatency"
PARTS = {
    "cumem": Part(
        ("basic_correctness/memory/cumem/test_cumem.py", "basic_correctness/test_cumem.py"),
        ("release_kv_cache or only_weights", "not release_kv_cache and not only_weights"),
    ),
    "backends": Part(("v1/worker/test_sleep_mode_backend.py",)),
    # Without the test of a quantised checkpoint (kv_scales), which scenarios/surviving.py has.
    "sleep_mode": Part(
        ("basic_correctness/memory/sleep_mode/test_sleep_mode.py",),
        ("cudagraph_pool", "not cudagraph_pool and not kv_scales"),
    ),
    "routes": Part(("entrypoints/rl/state_transitions/test_sleep.py",), servers=True),
    # An open pull request (54930).
    "sleep_wake": Part(
        ("entrypoints/serve/dev/rlhf/test_sleep_wake.py", "entrypoints/rl/state_transitions/test_sleep_wake.py"),
        tuple(f"{runner} and {which}({_ISOLATED})" for runner in ("MRV2", "MRV1") for which in ("", "not ")),
        servers=True,
    ),
}

ALIVE = {"CUMEM_SLEEP_HEALTH": "ok"}  # what those tests ask /health, asleep or not
WAYS: dict[str, dict[str, Any]] = {
    "cumem_sleep": {"backend": "cumem_sleep"},
    "default": {},
    "without": {"environment": {"CUMEM_SLEEP_DISABLE": "1"}},
    "gate": {"backend": "cumem_sleep", "gate": True, "environment": ALIVE},
    "gate_wait": {"backend": "cumem_sleep", "gate": True, "environment": {**ALIVE, "CUMEM_SLEEP_ON_REQUEST": "wait"}},
}

# Fail with this layer by what they look at.
INSIDE = {
    "test_basic_cumem": "counts vLLM's own calls of torch.accelerator.empty_cache and synchronize",
    "test_level2_discards_ordinary_tensor_with_weights_tag": "patches cumem.create_and_map, which is vLLM's own",
    "test_sleep_cudagraph_pool": "vLLM moves graphs by the name of its backend, `cumem`, which uses this layer, too",
}


# Models


def write_tokenizer(folder: Path, size: int) -> None:
    """Three special tokens, one for each byte, and words that no text has, but a model's answers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet, *(f"word{number}" for number in range(size - len(alphabet) - 3))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def write_qwen3(folder: Path) -> None:
    write_checkpoint(folder, SHAPES["0.6B"], seed=1)
    write_tokenizer(folder, SHAPES["0.6B"].vocabulary)


def small(kind: str, **sizes: Any) -> Callable[[Path], None]:
    """Writes a model of this type of transformers' with two layers."""
    usual = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8192}

    def write(folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        config = AutoConfig.for_model(kind, **usual, **tokens, **sizes)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        write_tokenizer(folder, VOCABULARY)

    return write


MODELS = {
    "Qwen/Qwen3-0.6B": write_qwen3,
    "Qwen/Qwen2-0.5B": small("qwen2", intermediate_size=512, num_key_value_heads=2),
    "facebook/opt-125m": small("opt", ffn_dim=512, word_embed_proj_dim=256),
    "hmellor/tiny-random-LlamaForCausalLM": small("llama", intermediate_size=512),
    "meta-llama/Llama-3.2-1B": small("llama", intermediate_size=512),
}


def write_models(cache: Path) -> None:
    """Where huggingface_hub looks for what it has downloaded."""
    revision = "0" * 40
    for name, write in MODELS.items():
        repository = cache / f"models--{name.replace('/', '--')}"
        if (repository / "refs" / "main").exists():
            continue
        folder = repository / "snapshots" / revision
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(revision)  # last: it is complete


# In pytest: this file is its plugin, and is told by a variable how this run is to be


def _record(**event: Any) -> None:
    with open(SETTINGS["events"], "a") as events:
        events.write(json.dumps(event) + "\n")


def pytest_configure() -> None:
    """Load plugins, as vLLM does when an engine is made: some tests use its allocator without one."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    backend, made = SETTINGS.get("backend"), EngineArgs.__post_init__

    def make(self: Any) -> None:
        if backend:
            self.sleep_mode_backend = backend
        made(self)

    EngineArgs.__post_init__ = make
    start = subprocess.Popen.__init__

    def start_server(self: Any, args: Any, *more: Any, **options: Any) -> None:
        start(self, served(args), *more, **options)

    subprocess.Popen.__init__ = start_server  # type: ignore[method-assign]


def served(command: Any) -> Any:
    """The command of a server, with what this run adds to it; any other as it is."""
    if not isinstance(command, list):
        return command
    if command[:2] == ["vllm", "serve"]:  # unpacked wheels have no scripts
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *command[1:]]
    if not {"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"} & set(command):
        return command
    backend = ["--sleep-mode-backend", SETTINGS["backend"]] if "backend" in SETTINGS else []
    gate = ["--middleware", "cumem_sleep.vllm.SleepGate"] if "gate" in SETTINGS else []
    return [*command, *backend, *gate, *SETTINGS["more"]]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Servers of jobs that run at the same time take ports of their own."""
    for module in {item.module for item in items}:
        if hasattr(module, "server"):
            server = inspect.unwrap(module.server)
            server.__defaults__ = tuple(
                SETTINGS["port"] if each == USUAL_PORT else each for each in server.__defaults__
            )


def pytest_collection_finish(session: Any) -> None:
    _record(collected=[item.nodeid for item in session.items])


def pytest_unconfigure() -> None:
    """Leave no server behind: the next run would meet it at its port."""
    kill_descendants()


def pytest_runtest_logreport(report: Any) -> None:
    why = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr)
        if why.startswith("Failed: Timeout"):  # what it waited for would keep its part of the GPU
            kill_descendants()
    elif report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    _record(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, why=why[:600])


# Jobs


class Job(NamedTuple):
    """One run of pytest; `tests`, where there are any, are those that it is to run."""

    way: str
    part: str
    select: str = ""
    tests: tuple[str, ...] = ()


def outcomes(events: Iterable[dict[str, Any]], why_not: str) -> dict[str, Run]:
    """What became of each test: `passed`, `failed`, `skipped`, or `not run` for the reason given."""
    found: dict[str, Run] = {}
    for event in events:
        for test in event.get("collected", [event.get("test")]):
            found.setdefault(test, {"outcome": "not run", "seconds": 0.0, "why": why_not})
        if "test" in event:
            known = found[event["test"]]
            known["seconds"] = round(known["seconds"] + event["seconds"], 2)
            if known["outcome"] != "failed" and (event["when"] == "call" or event["outcome"] != "passed"):
                known.update(outcome=event["outcome"], why=event["why"])
    return found


class Runner:
    """Runs jobs, each on a GPU of its own; `runs` is what became of each test, by part, test and way."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._ends_at = time.monotonic() + arguments.deadline
        # In a checkout Python would take vLLM's sources for the installed vLLM.
        self._root = arguments.work.resolve() / "root"
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(arguments.checkout / "tests", self._root / "tests")
        self._logs = arguments.out.resolve().parent / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._gpus: queue.SimpleQueue[int] = queue.SimpleQueue()
        for gpu in range(arguments.gpus):
            self._gpus.put(gpu)
        self._numbers = itertools.count(1)
        self.runs: dict[str, dict[str, dict[str, Run]]] = {}

    def run(self, jobs: list[Job]) -> None:
        with ThreadPoolExecutor(self._arguments.gpus) as pool:
            for job, found in zip(jobs, pool.map(self._run, jobs), strict=True):
                for test, run in found.items():
                    name = test.partition("::")[2] or test
                    if run["outcome"] == "failed" and job.way != "without":
                        run["inside"] = INSIDE.get(name.partition("[")[0], "")
                    self.runs.setdefault(job.part, {}).setdefault(name, {})[job.way] = run

    def again(self) -> Iterator[Job]:
        """What failed with this layer, without it."""
        for part, tests in self.runs.items():
            failed = [test for test, ways in tests.items() if any(run["outcome"] == "failed" for run in ways.values())]
            if failed:
                yield Job("without", part, tests=tuple(f"{self._file(part)}::{test}" for test in failed))

    def _file(self, part: str) -> str | None:
        paths = [f"tests/{path}" for path in PARTS[part].paths]
        return next((path for path in paths if (self._root / path).exists()), None)

    def _run(self, job: Job) -> dict[str, Run]:
        number, file, gpu = next(self._numbers), self._file(job.part), self._gpus.get()
        events, log = (self._logs / f"{job.way}-{job.part}-{number}.{kind}" for kind in ("jsonl", "log"))
        why, last = "not in this checkout", ""
        try:
            if file is not None:
                why = "no time was left"
                if (seconds := self._ends_at - time.monotonic()) > LEAST_S:
                    self._pytest(job, number, gpu, job.tests or (file,), events, log, seconds)
                    last = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
        finally:
            self._gpus.put(gpu)
        read = [json.loads(line) for line in events.read_text().splitlines()] if last and events.exists() else []
        return outcomes(read or [{"collected": [f"{job.part} {job.select}"]}], why if read else last or why)

    def _pytest(
        self, job: Job, number: int, gpu: int, tests: tuple[str, ...], events: Path, log: Path, seconds: float
    ) -> None:
        arguments, way = self._arguments, WAYS[job.way]
        settings = {**way, "events": str(events), "port": USUAL_PORT + number, "more": arguments.server_options.split()}
        folders = [str(self._root), str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **({"CUDA_VISIBLE_DEVICES": str(gpu)} if arguments.gpus > 1 else {}),
            "HF_HOME": str(arguments.work.resolve() / "hf"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(arguments.work.resolve() / f"cache-{gpu}"),
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            VARIABLE: json.dumps(settings),
            **way.get("environment", {}),
        }
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "upstream_tests", "-p", "no:cacheprovider"]
        command += [f"--rootdir={self._root}", f"--timeout={arguments.limit}", "--timeout-method=signal", *tests]
        if select := " and ".join(f"({each})" for each in (job.select, arguments.select) if each):
            command += ["-k", select]
        print(f"{time.strftime('%X')} GPU {gpu}: {job.way}, {job.part} {select}", flush=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self._root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(seconds - LEAST_S / 2)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # as Ctrl-C
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEAST_S / 3)
            finally:
                kill_descendants(process.pid)
                process.kill()
                process.wait()


def table(runs: dict[str, dict[str, dict[str, Run]]]) -> Iterator[str]:
    kinds = ("passed", "failed", "skipped", "not run")
    yield f"{'part':12}{'way':13}" + "".join(f"{kind:>9}" for kind in kinds)
    for part, tests in runs.items():
        for way in WAYS:
            counts = Counter(ways[way]["outcome"] for ways in tests.values() if way in ways)
            if counts:
                yield f"{part:12}{way:13}" + "".join(f"{counts[kind]:9}" for kind in kinds)
    for part, tests in runs.items():
        for test, ways in tests.items():
            for way, run in ways.items():
                if run["outcome"] in ("failed", "not run"):
                    why = run.get("inside") or " ".join(run["why"].split())
                    yield f"{run['outcome']}: {part} {test} ({way}): {why[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of vLLM; its folder `tests` is enough")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help="%(default)s")
    parser.add_argument("--ways", default="cumem_sleep,default", help=f"of {', '.join(WAYS)} (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="run what failed without this layer, too")
    parser.add_argument("--select", default="", help="pytest's expression (-k), for all parts")
    parser.add_argument("--gpus", type=int, default=1, help="how many jobs run at a time")
    parser.add_argument("--limit", type=int, default=180, help="seconds for one test (%(default)s)")
    parser.add_argument("--deadline", type=float, default=560, help="seconds that all of it may take (%(default)s)")
    parser.add_argument("--server-options", default="", help="more options of every server")
    parser.add_argument("--work", type=Path, default=Path("/tmp/upstream-tests"), help="folder for models and caches")
    arguments = parser.parse_args()
    parts, ways = arguments.parts.split(","), arguments.ways.split(",")
    if unknown := (set(parts) - set(PARTS)) | (set(ways) - set(WAYS)):
        parser.error(f"{', '.join(sorted(unknown))}: no such part or way")
    runner = Runner(arguments)
    machine = machine_apart("vllm")
    writing = get_context("spawn").Process(target=write_models, args=(arguments.work / "hf" / "hub",))
    writing.start()  # in a process of its own, since its CUDA context takes memory of the GPU
    writing.join()
    runner.run(
        [
            Job(way, part, select)
            for part in parts
            for way in ways
            if PARTS[part].servers or "gate" not in WAYS[way]
            for select in ([""] if arguments.select else PARTS[part].jobs)
        ]
    )
    if arguments.compare and "without" not in ways:
        runner.run([*runner.again()])
    arguments.out.write_text(json.dumps({"machine": machine, "runs": runner.runs}, indent=2) + "\n")
    print(*table(runner.runs), sep="\n")


if __name__ == "__main__":
    main()
