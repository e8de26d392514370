"""torch_memory_saver, served by cumem-sleep: `cumem-sleep shim torch_memory_saver` put this package first."""

from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
