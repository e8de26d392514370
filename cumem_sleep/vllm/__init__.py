"""cumem-sleep in vLLM: installing the package is enough (docs/vllm.md).

`plugin.register` is the entry point in the group `vllm.general_plugins`; `SleepGate` is for `vllm serve --middleware
cumem_sleep.vllm.SleepGate`. Everything is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gate import SleepGate

__all__ = ["SleepGate"]


def __getattr__(name: str) -> Any:
    if name != "SleepGate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..settings import GateSettings
    from .gate import SleepGate

    # vLLM looks up the class before it serves, but creates the gate only in the ASGI lifespan, where uvicorn takes
    # errors for "no lifespan". So a bad setting has to stop the server here.
    GateSettings.from_environment()
    return SleepGate
