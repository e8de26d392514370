"""What vLLM's workers are given on top (`--worker-extension-cls`), so that a benchmark can do what only they can."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

STANDARD_DEVIATION = 0.02


class Extension:
    """Its methods become methods of vLLM's worker."""

    model_runner: Any
    rank: int

    def fill_with_normal_values(self) -> int:
        """Normally distributed matrices, as trained ones nearly are: vLLM's dummy weights are uniform.

        Backups that were prepared are made anew after it. Returns the bytes that were written.
        """
        import torch

        from cumem_sleep import CuMemAllocator

        written = 0
        for parameter in self.model_runner.model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.data.normal_(std=STANDARD_DEVIATION)
                written += parameter.nbytes
        torch.cuda.synchronize()
        allocator = CuMemAllocator.get_instance()
        if allocator.settings.prepare:
            allocator.prepare()
        return written

    def limit_host_memory(self, rank: str, nbytes: str) -> None:
        """Let this rank take so much host memory for backups, or, without a number, what its settings allow.

        The budget of the settings holds for all ranks alike: it comes from the environment.
        """
        from cumem_sleep import CuMemAllocator

        allocator = CuMemAllocator.get_instance()
        if self.rank == int(rank):
            budget = int(nbytes) if nbytes else allocator.settings.host_budget_bytes
            tier = allocator._store._tier
            tier._settings = replace(tier._settings, host_budget_bytes=budget)

    def forget_backups(self) -> None:
        """The next sleep copies everything again."""
        from cumem_sleep import CuMemAllocator

        CuMemAllocator.get_instance().release_backups()

    def process_id(self) -> int:
        return os.getpid()
