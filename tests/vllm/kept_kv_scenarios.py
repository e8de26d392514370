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


def sleep(core: Any, level: int = 1, mode: str = "abort") -> None:
    core.finish(core.sleep(level, mode))


def kept_bytes(core: Any) -> int:
    return sum(usage.kept_bytes for usage in core.worker._allocator.usage().values())


def _update_awake(core: Any) -> None:
    core.collective_rpc("change_weights")
    sleep(core)
    core.wake_up()


def _update_asleep(core: Any) -> None:
    sleep(core)
    core.wake_up(["weights"])
    core.collective_rpc("change_weights")
    core.wake_up(["kv_cache"])


def _written_unseen_asleep(core: Any) -> None:
    sleep(core)
    core.wake_up(["weights"])
    core.worker.write_unseen()
    core.wake_up(["kv_cache"])


def _forget(core: Any) -> None:
    sleep(core)
    assert kept_bytes(core) > 0
    core.collective_rpc("cumem_sleep_forget", args=(["weights"],))
    assert kept_bytes(core) == 0
    core.wake_up()


def _function_for_workers(core: Any) -> None:
    core.collective_rpc(lambda worker: None)
    sleep(core)
    core.wake_up()


def _look(core: Any) -> None:
    core.collective_rpc("check_health")
    core.collective_rpc("cumem_sleep_status")
    sleep(core)
    core.collective_rpc("cumem_sleep_status")
    core.wake_up()


def _reset_asleep(core: Any) -> None:
    sleep(core)
    assert kept_bytes(core) > 0
    assert core.reset_prefix_cache()
    assert kept_bytes(core) == 0
    core.wake_up()


def _unwanted(core: Any) -> None:
    core.collective_rpc("cumem_sleep_keep_kv", args=(False,))
    core.finish(core.sleep(0, "keep"))  # does not count
    core.resume_scheduler()
    sleep(core)
    core.wake_up()


def _unwanted_before(core: Any) -> None:
    _unwanted(core)
    add(core, "again", PROMPT, 2)
    run_to_end(core)
    sleep(core)
    core.wake_up()


def _twice(core: Any) -> None:
    sleep(core)
    sleep(core, mode="keep")
    core.wake_up()


def _twice_half_awake(core: Any) -> None:
    sleep(core)
    core.wake_up(["weights"])
    sleep(core)
    core.wake_up()


def _level_2_asleep(core: Any) -> None:
    sleep(core)
    sleep(core, 2)
    core.wake_up()


def _resumed_asleep(core: Any) -> None:
    sleep(core)
    core.resume_scheduler()
    core.wake_up()


def _by_tags(core: Any) -> None:
    sleep(core, mode="keep")
    core.wake_up(["kv_cache"])
    assert core.is_scheduler_paused()
    core.wake_up(["weights"])


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


def _level(level: int) -> Callable[[Any], None]:
    def act(core: Any) -> None:
        sleep(core, level)
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


def _other_has_no_room(core: Any) -> None:
    core.ranks.blocks = 0
    sleep(core)
    core.wake_up()


def _lost(core: Any) -> None:
    sleep(core)
    drop_kept(core.worker._allocator)
    core.wake_up()


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


# Whether the prompt's tokens are found afterwards, and what the log said.
SCENARIOS: dict[str, tuple[Callable[[Any], None], bool, str]] = {
    "level 1": (_level(1), True, KEPT),
    "level 2": (_level(2), False, ""),
    "level 3": (_level(3), True, KEPT),
    "tags": (_by_tags, True, KEPT),
    **{f"requests and mode {mode}": (_running(mode), True, KEPT) for mode in ("abort", "wait", "keep")},
    "calls that write nothing": (_look, True, KEPT),
    "an update awake": (_update_awake, False, "change_weights may have changed weights since the last reset"),
    "an update asleep": (_update_asleep, False, "change_weights may have changed weights while the model slept"),
    "a write asleep that no call tells of": (_written_unseen_asleep, False, "the weights are not those that it was"),
    "a forget": (_forget, False, "cumem_sleep_forget may have changed weights while the model slept"),
    "a function for the workers": (_function_for_workers, False, "<lambda> may have changed weights"),
    "a reset asleep": (_reset_asleep, False, ""),
    "not wanted": (_unwanted, False, ""),
    "wanted again": (_unwanted_before, True, KEPT),
    "a second sleep": (_twice, True, KEPT),
    "a second sleep, half awake": (_twice_half_awake, False, ""),
    "level 2 after level 1": (_level_2_asleep, False, ""),
    "resumed asleep": (_resumed_asleep, False, "the scheduler is resumed while memory sleeps"),
    "a sleep that fails before the memory's": (_failing_sleep("before"), True, ""),
    "a sleep that fails after the memory's": (_failing_sleep("after"), False, "some memory slept for a while"),
    "a sleep that is undone in part": (_undone_in_part, False, "some memory slept for a while"),
    "a wake that fails before the memory's": (_failing_wake("before wake"), True, KEPT),
    "a wake that fails after the memory's": (_failing_wake("after wake"), True, KEPT),
    **{
        f"another rank: {question}": (_other_fails(question), False, "another rank cannot")
        for question in ("room", "plan", "kept", "whole")
    },
    "no room in another rank": (_other_has_no_room, False, "there is no host memory for a block of it"),
    "given up": (_lost, False, "drop_kept() was called"),
    "the last step under way": (_last_step_under_way, True, KEPT),
    "steps under way": (_steps_under_way, False, "steps are still under way"),
}


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _wrong(core: Any, name: str, said: list[str]) -> list[str]:
    """What a scenario did not do as its row says."""
    act, is_found, expected = SCENARIOS[name]
    core.reset_prefix_cache()
    core.worker.faults.clear()
    core.worker.breaks, core.worker.version, core.worker.oldest = [], 0, 0
    core.ranks.blocks, core.ranks.fails_at = 1 << 20, ""
    add(core, f"{name}: before", PROMPT, 2)
    run_to_end(core)
    said.clear()
    act(core)
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
