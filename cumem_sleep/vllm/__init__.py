"""cumem-sleep in vLLM: installing the package is enough (README.md, "With vLLM").

`plugin.register` is the entry point in the group `vllm.general_plugins`; `SleepGate` is for
`vllm serve --middleware cumem_sleep.vllm.SleepGate`. Nothing here imports vLLM before it is needed.
"""

from .gate import SleepGate

__all__ = ["SleepGate"]
