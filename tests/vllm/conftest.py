"""The fixtures of the conformance tests."""

import inspect

import pytest
from environment import _stock, plugged, spawned, stock, vllm_version
from gate_client import gate_environment, policy, run, serve
from ready_process import ready_process
from real_worker import choose, models, worker

__all__ = [
    "_stock",
    "choose",
    "gate_environment",
    "models",
    "plugged",
    "policy",
    "ready_process",
    "serve",
    "spawned",
    "stock",
    "vllm_version",
    "worker",
]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
