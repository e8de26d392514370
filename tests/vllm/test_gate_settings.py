"""Settings of the gate, and how it starts."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_vllm import FakeEngine, FakeVllm
from gate_client import TOKEN, Serve

from cumem_sleep import InvalidArgument, InvalidState
from cumem_sleep.core import misspelt
from cumem_sleep.settings import GateSettings
from cumem_sleep.vllm import SleepGate

pytestmark = pytest.mark.usefixtures("gate_environment")


def test_settings_default() -> None:
    assert GateSettings.from_environment({}) == GateSettings("reject", 60.0, 5, "auto", None)


def test_settings_come_from_the_environment() -> None:
    texts = {
        "on_request": ("wake", "wake"),
        "request_deadline_s": (" 0.5 ", 0.5),
        "retry_after_s": ("7", 7),
        "health": ("ok", "ok"),
        "admin_token": (TOKEN, TOKEN),
        "admin": ("unix:/run/admin", "unix:/run/admin"),
        "idle_s": ("300", 300.0),
        "idle_level": ("2", 2),
        "idle_awake_s": ("1.5", 1.5),
        "max_held_requests": ("10", 10),
        "max_held_bytes": ("1MiB", 1 << 20),
        "loading_methods": ("refit, load_it", ("refit", "load_it")),
    }
    assert {field.name for field in dataclasses.fields(GateSettings)} == set(texts)
    environment = {f"CUMEM_SLEEP_{name.upper()}": text for name, (text, _) in texts.items()}
    assert dataclasses.asdict(GateSettings.from_environment(environment)) == {
        name: value for name, (_, value) in texts.items()
    }
    assert GateSettings.__doc__ is not None
    assert all(f"{name}: " in GateSettings.__doc__ for name in texts)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ON_REQUEST", "sleep", "one of reject, wait, wake"),
        ("HEALTH", "true", "one of auto, ok, unavailable"),
        ("REQUEST_DEADLINE_S", "soon", "seconds from 0 to 86400"),
        ("MAX_HELD_REQUESTS", "many", "a whole number of at least 0"),
        ("MAX_HELD_BYTES", "2 barrels", "expected a number of bytes"),
        ("LOADING_METHODS", "refit;drop()", "names are separated by commas"),
        ("RETRY_AFTER_S", "0", "expected a whole number of seconds from 1 to 86400"),
    ],
)
def test_bad_values_name_variable_value_and_what_is_expected(variable: str, value: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GateSettings.from_environment({f"CUMEM_SLEEP_{variable}": value})
    assert f"CUMEM_SLEEP_{variable}=" in str(error.value)
    assert value in str(error.value)
    assert expected in str(error.value)


def test_a_token_may_be_in_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    named = {"CUMEM_SLEEP_ADMIN_TOKEN_FILE": str(file)}
    assert GateSettings.from_environment(named).admin_token == "s3cret"
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ADMIN_TOKEN is set, too: expected one of them"):
        GateSettings.from_environment({**named, "CUMEM_SLEEP_ADMIN_TOKEN": "s3cret"})
    for wrong in ("", "two words"):
        file.write_text(wrong)
        with pytest.raises(InvalidArgument, match=r"^CUMEM_SLEEP_ADMIN_TOKEN_FILE: expected printable ASCII"):
            GateSettings.from_environment(named)
    file.unlink()
    with pytest.raises(InvalidArgument, match="expected a file that can be read"):
        GateSettings.from_environment(named)
    file.symlink_to("/dev/zero")
    with pytest.raises(InvalidArgument, match="expected a plain file"):
        GateSettings.from_environment(named)
    unset = {"CUMEM_SLEEP_ADMIN_TOKEN": "s3cret", "CUMEM_SLEEP_ADMIN_TOKEN_FILE": ""}
    assert GateSettings.from_environment(unset).admin_token == "s3cret"


@pytest.mark.parametrize("token", ["", " ", "two words", "tab\t", "schlüssel"])
def test_a_token_that_cannot_guard_is_an_error_that_does_not_show_it(token: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GateSettings.from_environment({"CUMEM_SLEEP_ADMIN_TOKEN": token})
    assert "CUMEM_SLEEP_ADMIN_TOKEN" in str(error.value)
    assert not token.strip() or token not in str(error.value)


def test_bad_settings_stop_the_server_when_it_looks_the_class_up_and_when_it_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import cumem_sleep.vllm as package

    monkeypatch.setenv("CUMEM_SLEEP_ON_REQUEST", "nap")
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ON_REQUEST='nap'"):
        package.SleepGate  # noqa: B018
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ON_REQUEST='nap'"):
        SleepGate(FakeVllm())


def test_a_misspelt_variable_is_named_once_by_a_server_that_has_no_allocator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(misspelt, "_warned_of", set())
    monkeypatch.setenv("CUMEM_SLEEP_ADMINTOKEN", TOKEN)
    for _ in range(2):
        SleepGate(FakeVllm())
    assert caplog.text.count("did you mean CUMEM_SLEEP_ADMIN_TOKEN?") == 1
    assert TOKEN not in caplog.text


@pytest.mark.slow
def test_the_gate_is_a_class_and_its_import_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, inspect; from cumem_sleep.vllm import SleepGate; assert inspect.isclass(SleepGate);"
        "bad = {'vllm', 'torch', 'prometheus_client', 'fastapi', 'starlette'} & set(sys.modules); assert not bad, bad"
    )
    elsewhere = pathlib.Path(__file__).parent  # not the checkout, whose package may not be built
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=elsewhere)


async def test_one_line_says_the_policy_and_not_the_token(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cumem_sleep")
    serve(on_request="wait", request_deadline_s=9, admin_token=TOKEN)
    assert len(caplog.records) == 1
    for part in ("wait (at most 9 s)", "/health then: 200", "admin token: needed", "similar paths: open"):
        assert part in caplog.text
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(GateSettings(admin_token=TOKEN))


@pytest.mark.parametrize("lacks", ["modes of sleep", "a way for requests"])
async def test_a_server_of_a_vllm_before_0_18_does_not_start(
    serve: Serve, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeEngine, "release_kv_cache_memory")
    client, core = serve(), SimpleNamespace()

    async def sleep(level: int = 1) -> None: ...

    vars(client.engine).update({"sleep": sleep} if lacks == "modes of sleep" else {"engine_core": core})
    (said,) = await client.start()
    assert said["type"] == "lifespan.startup.failed"
    assert "needs the engine of vLLM 0.18 or newer" in said["message"]
    with pytest.raises(InvalidState):
        await client.ask()
