"""Fixtures. The suite runs on the simulated driver; with `CUMEM_SLEEP_TEST_DRIVER=cuda` it runs on a real GPU.

Tests marked `sim` need the simulated driver (its controls, its strictness), tests marked `gpu` a real GPU.

With `CUMEM_SLEEP_TEST_BEGUN=FILE` the tests that FILE names are left out, and each that begins is added: so a run that
crashed goes on behind the test that did it.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

_DRIVER = os.environ.get("CUMEM_SLEEP_TEST_DRIVER", "sim")
if _DRIVER not in ("sim", "cuda"):
    raise pytest.UsageError(f"CUMEM_SLEEP_TEST_DRIVER={_DRIVER!r}: expected sim or cuda")
# Before the package is imported: no setting of the user's own may change what is tested.
for _name in [name for name in os.environ if name.startswith("CUMEM_SLEEP_")]:
    if not _name.startswith("CUMEM_SLEEP_TEST_"):
        del os.environ[_name]
os.environ["CUMEM_SLEEP_DRIVER"] = _DRIVER
# Taken out of the environment: a test that starts pytest starts a run of its own.
_BEGUN = Path(os.environ.pop("CUMEM_SLEEP_TEST_BEGUN")) if "CUMEM_SLEEP_TEST_BEGUN" in os.environ else None
# NumPy's BLAS starts a thread a core that spins at first, in every process of a test; nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Modules of checks, whose failures are to say as much as those of tests.
pytest.register_assert_rewrite(
    "backed_up", "compression", "filled", "interrupts", "preparing", "sim_driver", "stand_ins", "waking", "world"
)

from support import Memory, free_everything, fresh_allocator, reset_simulation  # noqa: E402

from cumem_sleep import CuMemAllocator  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sim: needs the simulated driver (skipped on a real GPU)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _BEGUN is not None and _BEGUN.exists():
        begun = set(_BEGUN.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
        items[:] = [item for item in items if item.nodeid not in begun]
    skipped = {
        "sim": {"gpu": pytest.mark.skip(reason="needs a real GPU: run with CUMEM_SLEEP_TEST_DRIVER=cuda")},
        "cuda": {"sim": pytest.mark.skip(reason="needs the simulated driver, and this run is on a real GPU")},
    }[_DRIVER]
    for item in items:
        for marker, skip in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


def pytest_runtest_logstart(nodeid: str) -> None:
    if _BEGUN is not None:
        with _BEGUN.open("a") as begun:
            begun.write(f"{nodeid}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's frames let go of its tensors: fixtures free the memory, and PyTorch does not survive that."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None and not item.config.getoption("usepdb") else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # up to Python 3.12 the snapshot that pytest took lives on until somebody looks again
        error = error.__cause__ or error.__context__
    return report


def pytest_collection_finish() -> None:
    gc.freeze()  # what collecting imported (PyTorch is large) need not be searched in every test


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """After the test everything is freed, and nothing may be left of it."""
    reset_simulation()
    yield
    free_everything()
    reset_simulation()


@pytest.fixture
def make_allocator(nothing_left_behind: None) -> Callable[..., CuMemAllocator]:  # noqa: ARG001  (comes first)
    """Makes allocators with given settings."""
    return fresh_allocator


@pytest.fixture
def allocator(make_allocator: Callable[..., CuMemAllocator]) -> CuMemAllocator:
    """A fresh allocator with the default settings."""
    return make_allocator()


@pytest.fixture
def memory(make_allocator: Callable[..., CuMemAllocator]) -> Iterator[Memory]:  # noqa: ARG001  (comes first)
    """Reads and writes device memory; its own host memory is given back before the allocator's is counted."""
    content = Memory()
    yield content
    content.close()
