"""torch_memory_saver's interface on this layer: its regions are regions of the allocator (docs/torch-memory-saver.md).

`cumem-sleep shim torch_memory_saver` prints the folder whose package `torch_memory_saver` is this one.
"""

from __future__ import annotations

from .environment import configure_subprocess
from .saver import TorchMemorySaver

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

torch_memory_saver = TorchMemorySaver()
torch_memory_saver.begin_with_process()
