"""A watched worker whose KV cache says what was computed: each token's place holds the hash of all tokens up to it.

A step checks the places of all tokens that it does not compute itself, as attention would read them. Whatever is wrong
there, from whichever prefix hit, is in `faults`. It runs in the test's own process; of several workers, each runs in a
process of its own, with a simulated GPU of its own, and those of a pipeline have one layer and two.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from watched_worker import KV_CACHE, PAGE, WEIGHTS, WatchedWorker

from cumem_sleep import CuMemAllocator, _core, host_facts, sim
from cumem_sleep.for_plugin import drop_kept

BLOCK, HEADS, HEAD_SIZE = 16, 8, 64
PAGE_BYTES = 2 * BLOCK * HEADS * HEAD_SIZE * 2
LAYERS = ("layers.0", "layers.1", "layers.2")
WINDOW = 40  # tokens that the layers of a sliding window attend to
FIRST_TOKEN, TOKENS = 7, 100  # what it samples
NO_TOKEN = 0  # is never sampled

Chain = tuple[int, ...]
_mem_available_bytes = host_facts.mem_available_bytes


class HashingWorker(WatchedWorker):
    layout = "LBNHC"  # of vLLM 0.33
    layers = LAYERS[:2]
    windows: Mapping[str, int] = MappingProxyType({})

    def init_device(self) -> None:
        super().init_device()
        parallel = self.vllm_config.parallel_config
        if parallel.world_size > 1:
            sim.configure(device_bytes=256 << 20)
            with set_current_vllm_config(self.vllm_config):
                _join_vllms_groups(parallel, self.rank, self.local_rank, self.distributed_init_method)
            if parallel.pipeline_parallel_size > 1:
                self.layers = LAYERS[self.rank : 2 * self.rank + 1]
        self.faults: list[str] = []
        self.hits = 0  # tokens of new requests that were found in the prefix cache
        self.counts: Counter[str] = Counter()
        self._written: set[int] = set()  # blocks, since the memory last woke
        self.version = self.oldest = 0  # of weights: now, and of what a hit may have been computed with
        self.breaks: list[str] = []  # the next sleeps and wakes fail so: "before" or "after" the memory's
        self._requests: dict[str, SimpleNamespace] = {}
        self._chains: dict[tuple[str, tuple[int, ...]], tuple[Any, Chain]] = {}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        page = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
        specs = {
            name: SlidingWindowSpec(**page, sliding_window=self.windows[name])
            if name in self.windows
            else FullAttentionSpec(**page)
            for name in self.layers
        }
        assert {spec.page_size_bytes for spec in specs.values()} == {PAGE_BYTES}
        return specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [self.layout]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        tensors = kv_cache_config.kv_cache_tensors
        self._pages, views = {}, {}
        if hasattr(tensors[0], "layer_stride"):  # one allocation for all
            memory = self._memory(tensors[0].size)
            for tensor in tensors:
                for number, name in enumerate(tensor.layers):
                    begin = tensor.offset + number * tensor.layer_stride
                    views[name] = self._view(memory, begin, tensor.block_stride, kv_cache_config.num_blocks)
        else:
            for tensor in tensors:
                memory = self._memory(tensor.size)
                for name in tensor.shared_by:
                    views[name] = self._view(memory, 0, PAGE_BYTES, kv_cache_config.num_blocks)
        assert sorted(views) == sorted(self.layers)
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self._groups = {name: number for number, group in groups for name in group.layer_names}
        for name, view in views.items():
            self._pages[name] = view.view(torch.int64).numpy()
        contexts = {name: SimpleNamespace(kv_cache=view) for name, view in views.items()}
        self.vllm_config.compilation_config.static_forward_context.update(contexts)
        self.model_runner.kv_cache_config = kv_cache_config

    def _memory(self, nbytes: int) -> torch.Tensor:
        address = self._allocator.malloc(nbytes, KV_CACHE)
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.int8)

    @staticmethod
    def _view(memory: torch.Tensor, begin: int, stride: int, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, BLOCK, PAGE_BYTES // BLOCK)
        return torch.as_strided(memory, shape, (stride, PAGE_BYTES // BLOCK, 1), begin)

    def shutdown(self) -> None:
        if self.vllm_config.parallel_config.world_size > 1:  # its process ends
            return
        self._pages.clear()
        self._allocator.wake_up()
        for segment in _core.segments():
            self._allocator.free(segment.address)
        CuMemAllocator.instance = None

    # What the test asks all workers

    def report(self) -> dict[str, Any]:
        """Since `begin_episode`."""
        return {"faults": [f"worker {self.rank}: {fault}" for fault in self.faults], "counts": dict(self.counts)}

    def begin_episode(self) -> None:
        self.faults.clear()
        self.counts.clear()

    def break_at(self, rank: int, call: str, after: int, kept_bytes: int | None) -> None:
        """Of the worker `rank`, the driver call `call` fails after so many; and it has host memory for so much more
        than its weights, unless that is None.
        """
        if rank == self.rank:
            if call:
                sim.fail(call, after, "CUDA_ERROR_UNKNOWN")
            if kept_bytes is not None:
                left = kept_bytes + PAGE * (not self._allocator.usage()[WEIGHTS].backed_up_bytes)
                host_facts.mem_available_bytes = lambda **_: left

    def mend(self) -> None:
        sim.reset()
        host_facts.mem_available_bytes = _mem_available_bytes

    def drop_kept(self, rank: int) -> None:
        """The worker `rank` loses what it has kept."""
        if rank == self.rank:
            drop_kept(self._allocator)

    # Sleep

    def _break(self, when: str) -> None:
        if self.breaks and self.breaks[0] == when:
            del self.breaks[0]
            raise RuntimeError(f"broken {when} the memory's")

    def sleep(self, level: int = 1) -> None:
        self.oldest = self.version
        self._break("before")
        self._allocator.sleep(offload_tags=(WEIGHTS,) if level == 1 else ())
        if level != 1:
            self.change_weights()
        try:
            self._break("after")
        except RuntimeError:
            self._allocator.wake_up()  # as undone
            raise

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._break("before wake")
        if self._asleep():
            self._written.clear()
        self._allocator.wake_up(tags)
        self._break("after wake")

    def change_weights(self) -> None:
        """A trainer's own method."""
        self.version += 1
        if self._asleep():
            self.oldest = self.version

    def write_unseen(self) -> None:
        """As another process does through CUDA IPC: of no call could anybody know."""
        self._model.weight.data.view(torch.int16).add_(1)
        self.change_weights()

    def add_lora(self, lora_request: Any) -> bool:
        self.change_weights()
        return True

    # Steps

    def execute_model(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
        computed: dict[str, int] = {}
        found: dict[str, int] = {}  # of these tokens, in the prefix cache
        for new in scheduler_output.scheduled_new_reqs:
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            self._requests[new.req_id] = SimpleNamespace(tokens=tokens, blocks=[list(ids) for ids in new.block_ids])
            self._requests[new.req_id].adapter = new.lora_request.lora_name if new.lora_request else ""
            self._requests[new.req_id].drafts = []
            computed[new.req_id] = found[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, count in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self._requests[name]
            if name in cached.resumed_req_ids:
                request.tokens, request.blocks = list(cached.all_token_ids[name]), [[] for _ in request.blocks]
                request.drafts, found[name] = [], count
            # Scheduled ahead, it counts drafts that were rejected since.
            computed[name] = min(count, len(request.tokens) - 1) if request.drafts else count
            for known, more in zip(request.blocks, blocks or [[]] * len(request.blocks), strict=True):
                known.extend(more)
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        if asleep := self._asleep():
            self.faults.append(f"a step while {sorted(asleep)} sleeps")
        sampled = []
        for name, count in scheduled.items():
            request, end = self._requests[name], computed[name] + count
            self._note_hit(request, found.get(name, 0))  # maybe of what another request has just computed
            drafts = self._drafts(request, scheduler_output.scheduled_spec_decode_tokens.get(name, []))
            assert end - len(drafts) <= len(request.tokens), (name, computed[name], count, len(request.tokens))
            assert not drafts or end - len(drafts) == len(request.tokens), (name, computed[name], count, drafts)
            chain = self._chain(request.adapter, (*request.tokens, *drafts)[:end])
            self._check(name, request, chain[: computed[name]])
            for layer, pages in self._pages.items():
                ids, slots = self._places(layer, request, computed[name], end)
                pages[ids, slots, ::2] = np.array(chain[computed[name] :])[:, None]
                pages[ids, slots, 1::2] = self.version
                self._written.update(ids.tolist())
            sampled.append(self._sample(request, chain, drafts) if end >= len(request.tokens) else [])
        names = list(scheduled)
        self._scheduled = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._scheduled

    def _sample(self, request: SimpleNamespace, chain: Chain, drafts: list[int]) -> list[int]:
        """One token, and another one for each draft that is right until one is wrong; and drafts for the next step."""
        sampled: list[int] = []
        for draft, state in zip([*drafts, None], chain[len(chain) - 1 - len(drafts) :], strict=True):
            sampled.append(FIRST_TOKEN + state % TOKENS)
            if draft != sampled[-1]:
                break
        self.counts["accepted drafts"] += len(sampled) - 1
        self.counts["rejected drafts"] += len(drafts) - len(sampled) + 1
        request.tokens.extend(sampled)
        request.drafts = []
        for _ in range(self._drafts_at_once):
            state = self._chain(request.adapter, (*request.tokens, *request.drafts))[-1]
            is_wrong = state // TOKENS % 4 == 0
            request.drafts.append(FIRST_TOKEN + (state + is_wrong) % TOKENS)
        return sampled

    @property
    def _drafts_at_once(self) -> int:
        speculative = self.vllm_config.speculative_config
        return speculative.num_speculative_tokens if speculative else 0

    def _drafts(self, request: SimpleNamespace, scheduled: list[int]) -> list[int]:
        """The scheduler's, or where it knows none yet the worker's own."""
        own = [*request.drafts, *[NO_TOKEN] * len(scheduled)]
        return [ours if token < 0 else token for token, ours in zip(scheduled, own, strict=False)]

    def take_draft_token_ids(self) -> Any:
        names = [name for name in self._scheduled.req_ids if name in self._requests]
        return DraftTokenIds(names, [list(self._requests[name].drafts) for name in names])

    def _note_hit(self, request: SimpleNamespace, count: int) -> None:
        """So many tokens were found; some of them may be what a sleep kept."""
        self.hits += count
        blocks = {block for ids in request.blocks for block in ids[: count // BLOCK]} - {0}  # the null block
        kept = len(blocks - self._written)
        self.counts["kept blocks found"] += kept
        self.counts["kept blocks found with an adapter"] += kept * bool(request.adapter)

    def _check(self, name: str, request: SimpleNamespace, chain: Chain) -> None:
        """What attention reads."""
        if not chain:
            return
        for layer, pages in self._pages.items():
            begin = max(0, len(chain) + 1 - self.windows[layer]) if layer in self.windows else 0
            ids, slots = self._places(layer, request, begin, len(chain))
            read = pages[ids, slots]
            wrong = (read[:, ::2] != np.array(chain[begin:])[:, None]).any(axis=1)
            old = (read[:, 1::2] < self.oldest).any(axis=1) & ~wrong
            for what, places in (("another prefix", wrong), ("older weights", old)):
                if places.any():
                    first = int(np.flatnonzero(places)[0])
                    where = f"token {begin + first} of {len(chain)}, block {ids[first]}, {layer}"
                    self.faults.append(f"request {name} reads what is of {what}: {where}")

    def _places(self, layer: str, request: SimpleNamespace, begin: int, end: int) -> tuple[Any, Any]:
        """The blocks of these tokens, and where they are in these."""
        positions = np.arange(begin, end)
        return np.array(request.blocks[self._groups[layer]])[positions // BLOCK], positions % BLOCK

    def _chain(self, adapter: str, tokens: tuple[int, ...]) -> Chain:
        """For each token, the hash of the adapter, it, and all tokens before it."""
        known = self._chains.get((adapter, tokens))
        if known is None:
            shorter = self._chains.get((adapter, tokens[:-1]))
            state, hashes = shorter or (hashlib.blake2b(adapter.encode(), digest_size=7), ())
            state, more = state.copy(), []
            for token in tokens[len(hashes) :]:
                state.update(token.to_bytes(4, "little"))
                more.append(int.from_bytes(state.digest(), "little"))
            known = self._chains[adapter, tokens] = state, (*hashes, *more)
        return known[1]


class HybridHashingWorker(HashingWorker):
    """All layers but the first attend to a window alone: blocks before it are freed, and are not looked for."""

    windows = MappingProxyType(dict.fromkeys(LAYERS[1:], WINDOW))


class LatentHashingWorker(HashingWorker):
    """As of multi-head latent attention."""

    def get_kv_cache_spec(self) -> dict[str, Any]:
        page = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2 * HEADS * HEAD_SIZE, "dtype": torch.bfloat16}
        specs = {name: MLAAttentionSpec(**page) for name in self.layers}
        assert {spec.page_size_bytes for spec in specs.values()} == {PAGE_BYTES}
        return specs


def _join_vllms_groups(parallel: Any, rank: int, local_rank: int, method: str) -> None:
    """As vLLM's worker does, with nothing to communicate between devices."""
    from vllm.platforms import current_platform

    type(current_platform).get_device_communicator_cls = classmethod(
        lambda _: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    )
    parallel_state.init_distributed_environment(parallel.world_size, rank, method, local_rank, backend="gloo")
    parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
