"""SGLang's engine gives its memory back and takes it again, by torch_memory_saver 0.0.10 and by this layer.

    python benchmarks/sglang_cycles.py --out sglang_cycles.json --sglang FOLDER

FOLDER has SGLang 0.5.11 and torch_memory_saver, as `gpu_host_archives.py sglang` packs them. Each way is a process of
its own: `theirs` or `ours`, and behind a hyphen what is special: `graphs` (CUDA graphs in the saver, too), `retained`
(backups stay), `vault`, `compressed` (both of ours alone). In each:


- everything is released and resumed, up to --cycles times in at most --cycles-s seconds, to see whether memory grows;
- `kv_cache`, then `weights`, are released, and resumed the other way round;
- new weights are written between the resumes of `weights` and of `kv_cache`;
- all weights are compared by SGLang's own checker.

Tokens and log probabilities are compared with those before, after each. Weights are backed up by the saver. A way that
fails or takes too long loses nothing of the others. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import dummy_weights
from checkpoints import HEAD_DIM, SHAPES, write_config
from model_server import exit_on_sigterm, gpu_memory_in_use_bytes, host_memory_in_use_bytes
from record import GIB, machine_apart
from vault_process import Vault
from ways import Facts, Notes, Way

from cumem_sleep.tools.shim import FOLDERS

SPECIAL: dict[str, dict[str, str]] = {
    "graphs": {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
    "retained": {"TMS_RETAIN_CPU_BACKUP": "1"},
    "vault": {},
    "compressed": {"CUMEM_SLEEP_COMPRESS": "auto"},
}
KERNELS, KERNELS_S = "kernels", 120.0  # compiled before all ways, not to be measured with one of them
PROMPTS = [[5, 6, 7, 8, 9], [11, 6, 7, 8, 9], list(range(100, 400))]
GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
WRITTEN = "model.layers.0.mlp.down_proj.weight"
SETTLE_S = 0.5  # SGLang refuses to release while it still ends its last batch
LEAST_S = 45.0  # with less left a way is not begun
MOST_DIFFERENCE = 1e-3  # of log probabilities


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, with these weights."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = dummy_weights.fill
    return run_scheduler_process(*args, **kwargs)


def seconds(call: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


class Measured:
    """An engine, what it has answered before, and what is noted of it."""

    def __init__(self, engine: Any, notes: Notes) -> None:
        self._engine, self._notes = engine, notes
        self.expected = self.answers()

    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and log probabilities, one prompt after the other: what runs together may differ from time to time."""
        found = []
        for prompt in PROMPTS:
            one = self._engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True)
            found.append((list(one["output_ids"]), [each[0] for each in one["meta_info"]["output_token_logprobs"]]))
        return found

    def write(self, seed: int) -> None:
        """New values into one of the model's tensors."""
        import torch

        shape = SHAPES[self._notes.facts["shape"]]
        generator = torch.Generator("cuda").manual_seed(seed)
        values = torch.empty(shape.hidden, shape.intermediate, dtype=torch.bfloat16, device="cuda")
        values.uniform_(-0.05, 0.05, generator=generator)
        self._engine.update_weights_from_tensor([(WRITTEN, values)])

    def cycle(
        self,
        name: str,
        release: list[list[str] | None],
        resume: list[list[str] | None],
        write: Callable[[], None] | None = None,
    ) -> None:
        """Tags by call, None for all of them; `write` after the first resume. Notes a row."""
        time.sleep(SETTLE_S)
        release_s = [seconds(self._engine.release_memory_occupation, tags) for tags in release]
        row: Facts = {"name": name, "release_s": release_s, "gpu_bytes": gpu_memory_in_use_bytes()}
        row["host_bytes"] = host_memory_in_use_bytes()
        row["resume_s"] = []
        for tags in resume:
            row["resume_s"].append(seconds(self._engine.resume_memory_occupation, tags))
            if write is not None:
                row["write_s"], write = seconds(write), None
        start = time.perf_counter()
        found = self.answers()
        row["generate_s"] = time.perf_counter() - start
        row["same_tokens"] = [tokens for tokens, _ in found] == [tokens for tokens, _ in self.expected]
        row["logprobs_differ"] = max(
            abs(one - other)
            for (_, mine), (_, theirs) in zip(found, self.expected, strict=True)
            for one, other in zip(mine, theirs, strict=True)
        )
        self._notes.facts["rows"].append(row)
        self._notes.note(f"{name}: release {sum(release_s):.3f} s, resume {sum(row['resume_s']):.3f} s")


def one(way: str, arguments: argparse.Namespace) -> None:
    """One way, in this process and those that SGLang starts."""
    notes = Notes(way, arguments.work / f"{way}.json")
    notes.note("ready", shape=arguments.shape, is_ours=way.startswith("ours"))
    notes.wait_for_turn()
    if way == KERNELS:
        compile_kernels(SHAPES[arguments.shape].kv_heads // arguments.tensor_parallel)
        notes.note("done")
        return
    import sglang
    import torch
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    class EngineWithWeights(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(scheduler)

    spec = importlib.util.find_spec("torch_memory_saver")
    saver = Path(spec.origin or "").parent.parent.name if spec else None
    notes.note("engine", sglang=sglang.__version__, torch=torch.__version__, saver_in=saver)
    write_config(arguments.work / "model", SHAPES[arguments.shape])
    options: Facts = {
        "model_path": str(arguments.work / "model"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "disable_piecewise_cuda_graph": True,
        "context_length": 4096,
        "max_running_requests": 32,
        "random_seed": 0,
        "watchdog_timeout": 600,
        "tp_size": arguments.tensor_parallel,
    }
    options |= {"attention_backend": "triton", "mem_fraction_static": 0.8, "cuda_graph_bs": [1, 2, 4]}
    options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    engine = EngineWithWeights(**options)
    notes.note("first answers", gpu_bytes=gpu_memory_in_use_bytes(), host_bytes=host_memory_in_use_bytes())
    measured = Measured(engine, notes)
    measured.expected = measured.answers()  # kernels were compiled the first time
    ends_at = time.monotonic() + arguments.cycles_s
    for number in range(arguments.cycles):
        if time.monotonic() < ends_at:
            measured.cycle(f"cycle {number + 1}", [None], [None])
    rest = ["kv_cache", "cuda_graph"] if "graphs" in way.split("-") else ["kv_cache"]
    measured.cycle("kv_cache, weights", [rest, ["weights"]], [["weights"], rest])
    before = measured.expected
    measured.write(1)
    measured.expected = measured.answers()
    notes.note("written", writing_changes_answers=measured.expected != before)
    measured.write(2)
    measured.cycle("update", [None], [["weights"], rest], write=lambda: measured.write(1))

    def check(action: str) -> tuple[bool, str]:
        asked = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
        success, message = engine.loop.run_until_complete(asked)
        return bool(success), str(message)

    check("snapshot")
    measured.cycle("checked", [None], [None])
    same, message = check("compare")
    notes.note("compared", same_weights=same, checker=message)
    notes.note("done")
    os._exit(0)  # its processes end with the group


def compile_kernels(kv_heads: int) -> None:
    """What SGLang would compile while it starts, side by side; heads of one rank."""
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = "9.0"  # set here, no thread takes it away from another
    import torch
    from sglang.jit_kernel import activation, clamp_position, kvcache, norm, resolve_future_token_ids, rope
    from sglang.jit_kernel.utils import override_jit_cuda_arch

    kv_row_bytes = kv_heads * HEAD_DIM * 2
    jobs: list[Callable[[], object]] = [
        lambda: activation._jit_activation_module(torch.bfloat16),
        lambda: rope._jit_fused_rope_module(True, HEAD_DIM, torch.bfloat16),
        lambda: norm._jit_qknorm_module(HEAD_DIM, torch.bfloat16),
        lambda: kvcache._jit_kvcache_module(kv_row_bytes),
        lambda: clamp_position._jit_clamp_position_module(torch.int64),
        lambda: resolve_future_token_ids._jit_resolve_future_token_ids_module(torch.int64),
    ]
    with override_jit_cuda_arch(9, 0), ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def failure(facts: Facts) -> str:
    """Why a way does not count, in words; "" if it does."""
    if facts["phase"] != "done":
        return f"ended in phase {facts['phase']!r}, status {facts.get('status')}"
    wrong = [row["name"] for row in facts["rows"] if not row["same_tokens"] or row["logprobs_differ"] > MOST_DIFFERENCE]
    if wrong:
        return f"other answers after {', '.join(wrong)}"
    if facts.get("writing_changes_answers") is False:
        return "writing weights changed nothing"
    return "" if facts.get("same_weights", True) else f"weights differ: {facts['checker']}"


def summary(facts: Facts) -> Facts:
    """Of the cycles of all memory: the first, medians of the later ones, and what grew from the second to the last."""
    cycles = [row for row in facts["rows"] if row["name"].startswith("cycle ")]
    if not cycles:
        return {"cycles": 0}
    first, later, (second, last) = cycles[0], cycles[1:] or cycles, (cycles[min(1, len(cycles) - 1)], cycles[-1])
    found: Facts = {"cycles": len(cycles), "first_release_s": sum(first["release_s"])}
    for name in ("release_s", "resume_s"):
        found[name] = median(sum(row[name]) for row in later)
    found["generate_s"] = median(row["generate_s"] for row in later)
    found["released_gpu_bytes"] = last["gpu_bytes"]
    for name in ("gpu_bytes", "host_bytes"):
        found[f"grew_{name}"] = None if last[name] is None else last[name] - second[name]
    return found


def environment(way: str, arguments: argparse.Namespace) -> dict[str, str]:
    """What selects the saver, and what is special."""
    whose, *special = way.split("-")
    site = arguments.sglang / "site"
    first = [FOLDERS["torch_memory_saver"], site] if whose == "ours" else [site, arguments.sglang / "tms"]
    path = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    found = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_NUMA_BIND_V2": "0"}
    found["TVM_FFI_CACHE_DIR"] = str(arguments.sglang / "kernels")
    for each in special:
        found |= SPECIAL[each]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add("--sglang", type=Path, required=True, help="the folder with `site` and `tms`")
    add("--ways", default="ours,theirs", help="in this order (default: %(default)s)")
    add("--shape", default="8B", choices=sorted(SHAPES), help="of the model (default: %(default)s)")
    add("--tensor-parallel", type=int, default=1, help="GPUs (default: %(default)s)")
    add("--cycles", type=int, default=20, help="of all memory, at most (default: %(default)s)")
    add("--cycles-s", type=float, default=30, help="seconds in which one is begun (default: %(default)s)")
    add("--deadline", type=float, default=240, help="seconds for everything (default: %(default)s)")
    add("--work", type=Path, default=Path("/tmp/sglang-cycles"), help="for the model (default: %(default)s)")
    add("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begun = time.monotonic()
    if arguments.one:
        one(arguments.one, arguments)
        return
    exit_on_sigterm()
    names = arguments.ways.split(",")
    arguments.work.mkdir(parents=True, exist_ok=True)
    result: Facts = {
        "machine": machine_apart(),
        "shape": arguments.shape,
        "ways": {},
        "summary": {},
    }
    result["tensor_parallel"] = arguments.tensor_parallel
    failures = result["failures"] = {}
    for name in (KERNELS, *names):
        left = arguments.deadline - (time.monotonic() - begun)
        if left < LEAST_S:
            failures[name] = f"not begun, {left:.0f} s are left"
        else:
            with ExitStack() as stack:
                more = {}
                if "vault" in name.split("-"):
                    memory = SHAPES[arguments.shape].weights_bytes * 5 // 4 + 2 * GIB
                    more["CUMEM_SLEEP_VAULT"] = stack.enter_context(Vault(memory)).socket
                log = arguments.out.with_suffix(f".{name}.log")
                way = Way(name, arguments.work / f"{name}.json", log, {**environment(name, arguments), **more})
                stack.callback(way.kill)
                facts = way.run(min(left, KERNELS_S) if name == KERNELS else left)
            if failed := failure(facts):
                failures[name] = failed
                facts["log"] = way.last_words()
                print(f"FAILED {name}: {failed}", *facts["log"], sep="\n    | ", flush=True)
            result["ways"][name] = facts
            result["summary"][name] = found = summary(facts)
            print(name, {key: round(value, 3) if value else value for key, value in found.items()}, flush=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"whole run {time.monotonic() - begun:.1f} s; failures: {failures or 'none'}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":  # SGLang starts its processes by spawn, which imports this file again
    main()
