"""cumem-sleep in vLLM: installing the package is enough (README.md, "With vLLM").

`plugin.register` is the entry point in the group `vllm.general_plugins`; `SleepGate` is for
`vllm serve --middleware cumem_sleep.vllm.SleepGate`. Nothing here imports vLLM before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gate import SleepGate

__all__ = ["SleepGate"]


def __getattr__(name: str) -> object:
    """The gate is of use in the server's process alone; the plugin is loaded in all."""
    if name == "SleepGate":
        from .gate import SleepGate

        return SleepGate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
