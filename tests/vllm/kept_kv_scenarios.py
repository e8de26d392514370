"""Each way to lose a KV cache that survives a sleep, and each way to keep it, on the real scheduler of this vLLM.

A scenario sleeps and wakes in some way; then a prompt that was computed before is asked again. A table says whether its
tokens are found in the prefix cache, and what the log said.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kept_kv_episodes import add, engine, run_to_end

from cumem_sleep.for_plugin import drop_kept
from cumem_sleep.vllm import kept_kv

PROMPT = list(range(7, 107))  # six blocks and a part of one
KEPT = "the kept blocks of the KV cache are back"
Step = Callable[[Any], object]


def sleep(core: Any, level: int = 1, mode: str = "abort") -> None:
    core.finish(core.sleep(level, mode))


def kept_bytes(core: Any) -> int:
    return sum(usage.kept_bytes for usage in core.worker._allocator.usage().values())


def slept(level: int = 1, mode: str = "abort") -> Step:
    """A sleep."""
    return lambda core: sleep(core, level, mode)


def woken(*tags: str) -> Step:
    """A wake."""
    return lambda core: core.wake_up(list(tags) or None)


def call(method: Any, *args: Any) -> Step:
    """A call of all workers."""
    return lambda core: core.collective_rpc(method, args=args)


def _keeps(core: Any) -> None:
    assert kept_bytes(core) > 0


def _keeps_nothing(core: Any) -> None:
    assert kept_bytes(core) == 0


def _check(is_so: bool) -> None:
    assert is_so


def _ask_again(core: Any) -> None:
    add(core, "again", PROMPT, 2)
    run_to_end(core)


def _failing_sleep(when: str) -> Callable[[Any], None]:
    def fail(core: Any) -> None:
        core.worker.breaks = [when]
        with suppress(RuntimeError):
            sleep(core)
        assert not core.model_executor.is_sleeping
        assert kept_bytes(core) == 0
        core.resume_scheduler()

    return fail


def _undone_in_part(core: Any) -> None:
    allocator = core.worker._allocator
    own = allocator.sleep

    def refuse(*args: Any, keep: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        raise RuntimeError("the driver refuses to undo it")

    allocator.sleep = refuse
    with suppress(RuntimeError):
        sleep(core)
    del allocator.sleep
    core.collective_rpc("wake_up")
    core.resume_scheduler()


def _failing_wake(when: str) -> Callable[[Any], None]:
    def fail(core: Any) -> None:
        sleep(core)
        core.worker.breaks = [when]
        with suppress(RuntimeError):
            core.wake_up()
        assert core.is_scheduler_paused()
        core.wake_up()

    return fail


def _running(mode: str) -> Callable[[Any], None]:
    def act(core: Any) -> None:
        add(core, f"running {mode}", PROMPT[::-1], 30)
        for _ in range(6):
            core.step_once()
        sleep(core, mode=mode)
        core.wake_up()

    return act


def _other_fails(question: str) -> Callable[[Any], None]:
    def act(core: Any) -> None:
        core.ranks.fails_at = question
        sleep(core)
        assert (kept_bytes(core) > 0) == (question == "whole")
        core.wake_up()
        assert kept_bytes(core) == 0

    return act


def _steps_under_way(core: Any) -> None:
    add(core, "not answered yet", PROMPT[::-1], 2)
    core.batch_queue, own = ["a step"], core.batch_queue
    try:
        _in_the_users_process(core, "keep")
    finally:
        core.batch_queue = own
    core.wake_up()
    run_to_end(core)


def _last_step_under_way(core: Any) -> None:
    add(core, "answered", PROMPT, 2)
    while core.scheduler.requests:
        core.step_once()
    assert core.batch_queue, "the next step is not scheduled before the last one has run"
    _in_the_users_process(core, "abort")
    core.wake_up()


def _in_the_users_process(core: Any, mode: str) -> None:
    """A sleep as `LLM` makes it without a process for its engine: there a pause waits for nothing."""
    from vllm.v1.engine.core import EngineCore

    core.pause_scheduler = functools.partial(EngineCore.pause_scheduler, core)
    try:
        sleep(core, mode=mode)
    finally:
        del core.pause_scheduler


UNWANTED: list[Step] = [
    call("cumem_sleep_keep_kv", False),
    lambda core: core.finish(core.sleep(0, "keep")),  # does not count
    lambda core: core.resume_scheduler(),
    slept(),
    woken(),
]
# What is done, whether the prompt's tokens are found afterwards, and what the log said.
SCENARIOS: dict[str, tuple[list[Step], bool, str]] = {
    "level 1": ([slept(1), woken()], True, KEPT),
    "level 2": ([slept(2), woken()], False, ""),
    "level 3": ([slept(3), woken()], True, KEPT),
    "tags": (
        [slept(mode="keep"), woken("kv_cache"), lambda core: _check(core.is_scheduler_paused()), woken("weights")],
        True,
        KEPT,
    ),
    **{f"requests and mode {mode}": ([_running(mode)], True, KEPT) for mode in ("abort", "wait", "keep")},
    "calls that write nothing": (
        [call("check_health"), call("cumem_sleep_status"), slept(), call("cumem_sleep_status"), woken()],
        True,
        KEPT,
    ),
    "an update awake": (
        [call("change_weights"), slept(), woken()],
        False,
        "may have changed weights since",
    ),
    "an update asleep": (
        [slept(), woken("weights"), call("change_weights"), woken("kv_cache")],
        False,
        "change_weights may have changed weights while the model slept",
    ),
    "a write asleep that no call tells of": (
        [slept(), woken("weights"), lambda core: core.worker.write_unseen(), woken("kv_cache")],
        False,
        "the weights are not those that it was",
    ),
    "a forget": (
        [slept(), _keeps, call("cumem_sleep_forget", ["weights"]), _keeps_nothing, woken()],
        False,
        "cumem_sleep_forget may have changed weights while the model slept",
    ),
    "a function for the workers": (
        [call(lambda worker: None), slept(), woken()],
        False,
        "<lambda> may have changed",
    ),
    "a reset asleep": (
        [slept(), _keeps, lambda core: _check(core.reset_prefix_cache()), _keeps_nothing, woken()],
        False,
        "",
    ),
    "not wanted": (UNWANTED, False, ""),
    "wanted again": ([*UNWANTED, _ask_again, slept(), woken()], True, KEPT),
    "a second sleep": ([slept(), slept(mode="keep"), woken()], True, KEPT),
    "a second sleep, half awake": ([slept(), woken("weights"), slept(), woken()], False, ""),
    "level 2 after level 1": ([slept(), slept(2), woken()], False, ""),
    "resumed asleep": (
        [slept(), lambda core: core.resume_scheduler(), woken()],
        False,
        "the scheduler is resumed while memory sleeps",
    ),
    "a sleep that fails before the memory's": ([_failing_sleep("before")], True, ""),
    "a sleep that fails after the memory's": ([_failing_sleep("after")], False, "some memory slept for a while"),
    "a sleep that is undone in part": ([_undone_in_part], False, "some memory slept for a while"),
    "a wake that fails before the memory's": ([_failing_wake("before wake")], True, KEPT),
    "a wake that fails after the memory's": ([_failing_wake("after wake")], True, KEPT),
    **{
        f"another rank: {question}": ([_other_fails(question)], False, "another rank cannot")
        for question in ("room", "plan", "kept", "whole")
    },
    "no room in another rank": (
        [lambda core: vars(core.ranks).update(blocks=0), slept(), woken()],
        False,
        "there is no host memory for a block of it",
    ),
    "given up": (
        [slept(), lambda core: drop_kept(core.worker._allocator), woken()],
        False,
        "drop_kept() was called",
    ),
    "the last step under way": ([_last_step_under_way], True, KEPT),
    "steps under way": ([_steps_under_way], False, "steps are still under way"),
}


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _wrong(core: Any, name: str, said: list[str]) -> list[str]:
    """What a scenario did not do as its row says."""
    steps, is_found, expected = SCENARIOS[name]
    core.reset_prefix_cache()
    core.worker.faults.clear()
    core.worker.breaks, core.worker.version, core.worker.oldest = [], 0, 0
    core.ranks.blocks, core.ranks.fails_at = 1 << 20, ""
    add(core, f"{name}: before", PROMPT, 2)
    run_to_end(core)
    said.clear()
    for step in steps:
        step(core)
    hits = core.worker.hits
    add(core, f"{name}: after", PROMPT, 2)
    run_to_end(core)
    wrong = list(core.worker.faults)
    if (core.worker.hits >= hits + 96) != is_found:
        wrong.append(f"{core.worker.hits - hits} tokens were found")
    if expected and not any(expected in line for line in said):
        wrong.append(f"the log did not say so: {said}")
    return wrong


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        import watched_server

        folder = pathlib.Path(name)
        watched_server.prepare_process(folder)
        os.environ["CUMEM_SLEEP_KEEP_KV_BYTES"] = "1GiB"
        watched_server.model_folder(folder)
        importlib.import_module("vllm.v1.engine.core")
        core = engine(folder)
        heard = _Said()
        logging.getLogger("cumem_sleep").addHandler(heard)
        logging.getLogger("cumem_sleep").setLevel(logging.INFO)
        bad = 0
        for scenario in SCENARIOS:
            wrong = _wrong(core, scenario, heard.lines)
            print(scenario, wrong or "as it should be", flush=True)
            bad += bool(wrong)
        assert kept_kv._of(core)._refusal == ""
        core.shutdown()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    sys.exit(main())
