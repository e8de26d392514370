"""Each test loads a copy of the library of its own, hence starts from an untouched driver."""

from __future__ import annotations

import pathlib
import shutil
import sys
import types
from collections.abc import Callable

import pytest
from sim_driver import MIB, Driver

import cumem_sleep
from cumem_sleep import sim


@pytest.fixture
def load(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Load a fresh copy of the library under an environment, and let `cumem_sleep.sim` control it."""

    def load_copy(**environment: object) -> Driver:
        for name, value in environment.items():
            monkeypatch.setenv(f"CUMEM_SLEEP_SIM_{name}", str(value))
        copy = tmp_path / f"libcuda_sim_{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(sim.library_path(), copy)
        core = types.SimpleNamespace(driver_path=lambda: str(copy), driver_is_simulated=lambda: True)
        monkeypatch.setitem(sys.modules, "cumem_sleep._core", core)
        monkeypatch.setattr(cumem_sleep, "_core", core, raising=False)
        return Driver(copy)

    return load_copy


@pytest.fixture
def driver(load: Callable[..., Driver]) -> Driver:
    loaded = load(DEVICE_BYTES=256 * MIB)
    loaded.start()
    return loaded
