"""The scenarios of level 3 in its difficult cases, against servers that do right, and servers that do wrong."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.sim


@pytest.fixture
def level_3(benchmark_module: Any) -> ModuleType:
    found: ModuleType = benchmark_module("scenarios.level_3")
    return found


class Server:
    """`vllm serve` behind the gate, as far as a scenario asks; a sleep goes to level 3 when its metrics are asked.

    Attributes:
        wrong: what it does wrong.
    """

    def __init__(self, wrong: str, ranks: int, wakes_on_request: bool) -> None:
        self.wrong, self.ranks, self.wakes_on_request = wrong, ranks, wakes_on_request
        self.level = 0
        self.is_full = False
        self.is_half_way = False
        self.woken = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        del method, body
        if path.startswith("/sleep"):
            self.level = 3 if self.wrong == "goes deeper" and path.endswith("3") else 1
            why = "it has 2 ranks" if self.wrong != "no reason" else "no"
            return 200, {}, {"level": self.level, "why_not_deeper": why}
        if path == "/metrics":
            deepens = self.wrong != "stays" if self.ranks == 1 else self.wrong == "deepens"
            if deepens and self.level == 1 and not self.is_half_way:
                self.level = 3
            each = [1, 3] if self.wrong == "splits" and self.level else [self.level] * self.ranks
            lines = [f'cumem_sleep:sleep_level{{rank="{rank}"}} {level}.0' for rank, level in enumerate(each)]
            return 200, {}, "\n".join(["# HELP", *lines] if self.wrong != "no metrics" else [])
        if path == "/is_sleeping":
            return 200, {}, {"is_sleeping": self.level > 0 and self.wrong != "lies"}
        if path == "/collective_rpc":
            asleep = self.level > 0 and self.wrong != "awake"
            usage = {"weights": {"segments": 2, "asleep_segments": 2 * asleep}}
            return 200, {}, {"results": [{"usage": usage}] * self.ranks}
        assert path == "/wake"
        if self.is_full and self.wrong != "wakes without room":
            if self.wrong == "half way":
                self.level, self.is_half_way = 1, True
            return 503, {}, "out of luck" if self.wrong == "says nothing" else "OutOfDeviceMemory: 1 GiB is missing"
        if self.wrong == "stuck" and self.woken == 0:
            return 500, {}, "no"
        self._wake()
        return 200, {}, None

    def expect(self, status: int, method: str, path: str, body: Any = None) -> Any:
        found, _, content = self.ask(method, path, body)
        assert found == status, (path, content)
        return content

    def tokens(self, _prompt: list[int]) -> tuple[int, Any]:
        if self.level and not self.wakes_on_request:
            return 503 if self.wrong != "answers asleep" else 200, "asleep"
        if self.level:
            self._wake()
        return 200, [1, self.woken if self.wrong == "tokens" else 2]

    def _wake(self) -> None:
        self.level = 0
        self.woken += 1


def play(level_3: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, name: str, wrong: str) -> Any:
    of_two = name == "level_3_of_two_ranks"
    server = Server(wrong, ranks=2 if of_two else 1, wakes_on_request=of_two)

    @contextlib.contextmanager
    def gpu_is_full(_gpu: int) -> Iterator[None]:
        server.is_full = True
        yield
        server.is_full = False

    monkeypatch.setattr(level_3, "GatedServer", lambda *_: server)
    monkeypatch.setattr(level_3, "gpu_is_full", gpu_is_full)
    monkeypatch.setattr(level_3, "DEEP_AFTER_S", 0.0)
    monkeypatch.setattr(level_3, "DEEP_WITHIN_S", 0.0)
    return getattr(level_3, name)(folder / "model")


def test_servers_that_do_right_pass(
    level_3: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    facts = play(level_3, monkeypatch, tmp_path, "level_3_of_two_ranks", "")
    assert facts["answer"]["why_not_deeper"] == "it has 2 ranks"
    assert facts["levels after some time"] == [1, 1]
    facts = play(level_3, monkeypatch, tmp_path, "level_3_with_little_memory", "")
    assert facts["answer without room"] == [503, "OutOfDeviceMemory: 1 GiB is missing"]
    assert len(facts["retry s"]) == len(facts["until it is at level 3, s"]) == 2
    assert json.dumps(facts)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("level_3_of_two_ranks", "goes deeper", "it stays at level 1"),
        ("level_3_of_two_ranks", "no reason", "names the ranks"),
        ("level_3_of_two_ranks", "awake", "all ranks sleep"),
        ("level_3_of_two_ranks", "deepens", "it stays at level 1"),
        ("level_3_of_two_ranks", "splits", "it stays at level 1"),
        ("level_3_of_two_ranks", "no metrics", "metrics say the level"),
        ("level_3_of_two_ranks", "tokens", "tokens of a request that wakes it"),
        ("level_3_with_little_memory", "stays", "it goes to level 3"),
        ("level_3_with_little_memory", "wakes without room", "the wake fails"),
        ("level_3_with_little_memory", "says nothing", "says what is missing"),
        ("level_3_with_little_memory", "half way", "it is at level 3 still"),
        ("level_3_with_little_memory", "lies", "and says that it sleeps"),
        ("level_3_with_little_memory", "answers asleep", "a request is rejected"),
        ("level_3_with_little_memory", "stuck", "no"),
        ("level_3_with_little_memory", "tokens", "tokens after the retry"),
    ],
)
def test_servers_that_do_wrong_are_found(
    level_3: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str, wrong: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        play(level_3, monkeypatch, tmp_path, name, wrong)
