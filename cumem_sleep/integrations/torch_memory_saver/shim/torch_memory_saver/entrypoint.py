"""Where torch_memory_saver defines its class."""

from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver

__all__ = ["TorchMemorySaver"]
