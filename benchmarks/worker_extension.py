"""What vLLM's workers are given on top (`--worker-extension-cls`), so that a benchmark can do what only they can."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

STANDARD_DEVIATION = 0.02


class Extension:
    """Its methods become methods of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
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

    def fill_with_telling_values(self, seed: int) -> int:
        """Weights with which tokens depend on what is attended to. Returns the bytes that were written."""
        import dummy_weights

        return dummy_weights.fill(self.model_runner.model, seed * 1000 + self.rank)

    def exchange_kv_blocks(self) -> int:
        """Put each block's bytes in the place of the next one's. Returns how many layers there are.

        A control: if the tokens of a prefix that is found stay the same, they prove nothing of the cache.
        """
        import torch

        num_blocks = self.model_runner.kv_cache_config.num_blocks
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = [each.kv_cache for each in layers if isinstance(getattr(each, "kv_cache", None), torch.Tensor)]
        for cache in caches:
            of_blocks = [d for d in range(cache.dim()) if cache.shape[d] and cache.shape[d] % num_blocks == 0]
            (dimension,) = (d for d in of_blocks if cache.shape[d] >= num_blocks)
            numbers = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            numbers.copy_(numbers.roll(cache.shape[dimension] // num_blocks, dims=dimension))
        torch.cuda.synchronize()
        return len(caches)

    def limit_host_memory(self, rank: str, nbytes: str) -> None:
        """Let this rank take so much host memory for backups, or, without a number, what its settings allow.

        The budget of the settings holds for all ranks alike: it comes from the environment.
        """
        from cumem_sleep import CuMemAllocator

        allocator = CuMemAllocator.get_instance()
        if self.rank == int(rank):
            budget = int(nbytes) if nbytes else allocator.settings.host_budget_bytes
            tier = allocator._store.memory.tier
            tier._settings = replace(tier._settings, host_budget_bytes=budget)

    def let_ranks_checkpoint(self) -> dict[str, Any]:
        """Let this rank try level 3 as if it were alone. Returns what it shares with others, as far as is known."""
        import torch

        from cumem_sleep import CuMemAllocator
        from cumem_sleep.vllm import worker_checkpoint

        worker_checkpoint.why_not_for_ranks = lambda _ranks: ""
        CuMemAllocator.get_instance()._cuda.why_not = ""
        groups = torch.distributed.distributed_c10d._world.pg_map
        return {
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "PyTorch's communicators": sum(
                group._get_backend(torch.device("cuda"))._is_initialized()
                for group, (backend, _) in groups.items()
                if "nccl" in backend
            ),
        }

    def forget_backups(self) -> None:
        """The next sleep copies everything again."""
        from cumem_sleep import CuMemAllocator

        CuMemAllocator.get_instance().release_backups()

    def process_id(self) -> int:
        return os.getpid()

    def sums_of_parameters(self) -> dict[str, int]:
        """A checksum of each parameter, as it is on the GPU now."""
        import torch

        sums = {}
        for name, parameter in self.model_runner.model.named_parameters():
            sums[name] = int(parameter.data.contiguous().view(torch.int16).sum(dtype=torch.int64))
        torch.cuda.empty_cache()
        return sums
