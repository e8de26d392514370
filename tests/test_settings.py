"""Settings: fields, environment variables, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import re

import pytest

from cumem_sleep import InvalidArgument, InvalidArgumentType, Settings
from cumem_sleep.settings import BYTES, PREFIX, seconds


def test_defaults() -> None:
    assert Settings() == Settings.from_environment({})
    assert Settings() == Settings(
        driver="cuda", host_budget_bytes=None, retain_backups=True, verify="wake", poison=False, prefault_threads=None
    )


def test_every_field_has_a_variable() -> None:
    values = {
        "driver": ("sim", "sim"),
        "host_budget_bytes": ("12345", 12345),
        "retain_backups": ("0", False),
        "verify": ("off", "off"),
        "poison": ("yes", True),
        "prefault_threads": ("1024", 1024),
        "prepare": ("on", True),
        "prepare_bytes_per_second": ("5GB", 5 * 10**9),
        "compress": ("auto", "auto"),
        "vault": ("/run/user/7/vault.sock", "/run/user/7/vault.sock"),
        "keep_kv_bytes": ("2GiB", 2 << 30),
        "agreement_timeout_s": ("2.5", 2.5),
        "deep_after_s": ("90", 90.0),
        "resume_wait_s": ("0", 0.0),
    }
    assert {field.name for field in dataclasses.fields(Settings)} == set(values)
    environment = {PREFIX + name.upper(): text for name, (text, _) in values.items()}
    assert dataclasses.asdict(Settings.from_environment(environment)) == {
        name: value for name, (_, value) in values.items()
    }


def test_empty_and_other_variables_are_ignored() -> None:
    for text in ("", " ", "\t\n"):
        environment = {PREFIX + field.name.upper(): text for field in dataclasses.fields(Settings)}
        environment |= {"CUMEM_SLEEP_SIM_DEVICES": "2", "DRIVER": "sim", "HOME": "/"}
        assert Settings.from_environment(environment) == Settings()


@pytest.mark.parametrize("texts", [("1", "true", "True", "YES", "on"), ("0", "false", "FALSE", "no", "Off")])
def test_switches(texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in texts:
        monkeypatch.setenv("CUMEM_SLEEP_POISON", f" {text} ")
        assert Settings.from_environment().poison is (texts[0] == "1")


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("DRIVER", "CUDA cuda,sim"),
        ("HOST_BUDGET_BYTES", "-1 GiB 1e9 0x10"),
        ("RETAIN_BACKUPS", "2 maybe"),
        ("VERIFY", "on"),
        ("PREFAULT_THREADS", "0 -3 1.5 many ² 1025"),
        ("AGREEMENT_TIMEOUT_S", "soon 0 nan"),
    ],
)
def test_bad_variable_is_named_with_its_value_and_what_is_allowed(variable: str, texts: str) -> None:
    for text in texts.split():
        with pytest.raises(InvalidArgument, match=f"{PREFIX}{variable}={re.escape(repr(text))}.*expected"):
            Settings.from_environment({PREFIX + variable: text})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("driver", "vulkan", InvalidArgument),
        ("driver", None, InvalidArgumentType),
        ("verify", True, InvalidArgumentType),
        ("host_budget_bytes", -1, InvalidArgument),
        ("host_budget_bytes", 2**63, InvalidArgument),
        ("host_budget_bytes", True, InvalidArgumentType),
        ("host_budget_bytes", "30GiB", InvalidArgumentType),
        ("retain_backups", 1, InvalidArgumentType),
        ("prefault_threads", 2.0, InvalidArgumentType),
        ("prefault_threads", 1025, InvalidArgument),
    ],
)
def test_bad_field_is_named_with_its_value(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(f"{field}={value!r}")):
        Settings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["prefault_threads", "host_budget_bytes", "prepare_bytes_per_second", "agreement_timeout_s"]
)
def test_of_a_huge_number_only_the_size_is_told(field: str) -> None:
    """Python refuses to write thousands of digits."""
    with pytest.raises(InvalidArgument, match=f"{field}=a number of 16610 bits: expected"):
        Settings(**{field: 10**5000})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"{PREFIX}{field.upper()}=.*expected"):
        Settings.from_environment({PREFIX + field.upper(): "9" * 5000})


def test_seconds() -> None:
    of = {"0.5": 0.5, "90": 90.0, "500ms": 0.5, "1h30m": 5400.0, "1m 2.5s": 62.5, "1e3": 1000.0}
    assert {text: seconds(0).read("x", text) for text in of} == of
    for text in ("", "1x", "m", "-1s", "2d", "1h-", "nan", "inf"):
        with pytest.raises(InvalidArgument, match=f"^limit={re.escape(repr(text))}: expected seconds from 0 to 86400"):
            seconds(0).read("limit", text)


def test_bytes() -> None:
    of = {"0": 0, "512B": 512, "1KiB": 1024, "500MB": 500_000_000, "30gib": 30 << 30, "1.5 GiB": 3 << 29}
    of |= {" 7 MB ": 7_000_000, "0.1GB": 100_000_000, "2TiB": 2 << 40, "9007199254740993": 9007199254740993}
    of |= {"123456789.123456789GB": 123456789123456789}
    assert {text: BYTES.read("x", text) for text in of} == of
    for text in ("", "GiB", "1 2", "1,5GiB", "-1", "1.GiB", ".5GiB", "1KK", "1Gi", "1PB", "NaN"):
        with pytest.raises(InvalidArgument, match=f"^limit={re.escape(repr(text))}"):
            BYTES.read("limit", text)


def test_the_summary_names_what_is_not_as_it_is_by_default() -> None:
    assert Settings().summary() == "settings: the defaults"
    assert Settings(driver="sim", prepare=True).summary() == "settings: driver='sim', prepare=True"
