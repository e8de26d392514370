"""A test that fails on a GPU fails alone: neither the tests after it nor the process go with it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from support import DRIVER

pytestmark = pytest.mark.gpu
pytest.importorskip("torch")

TESTS = """
    import pytest, torch

    KEPT = []

    def make(allocator):
        with allocator.use_memory_pool("weights"):
            return torch.full((1 << 22,), 7, device="cuda")

    def test_that_fails_with_a_tensor_in_its_frame(allocator):
        tensor = make(allocator)
        assert int(tensor.sum()) == 0

    def test_after_it(allocator):
        tensor = make(allocator)
        allocator.sleep()
        allocator.wake_up()
        assert int(tensor[0]) == 7

    def test_that_keeps_a_tensor(allocator):
        KEPT.append(make(allocator))

    def test_after_that(allocator):
        KEPT.clear()
"""


def test_a_failing_test_fails_alone(tmp_path: pathlib.Path) -> None:
    here = pathlib.Path(__file__).parent.parent
    module = tmp_path / "test_failing.py"
    module.write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", str(module)],
        env={**os.environ, "PYTHONPATH": path, "CUMEM_SLEEP_TEST_DRIVER": DRIVER},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "the test left tensors behind" in done.stdout
