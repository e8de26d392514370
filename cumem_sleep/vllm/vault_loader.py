"""`--load-format cumem_sleep`: parameters' bytes come from the vault, where a process before has offered them.

All else is vLLM's: it builds the model, and after loading it processes the weights. Only what its own loader would
write into parameters comes from the vault, so no form of quantisation needs to be known here. Where anything is in
doubt, vLLM's own loader loads, and the log says why. Only what was loaded right before is offered: neither a weight
update nor an adapter has written to that.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .. import __version__
from ..allocator import CuMemAllocator
from ..backups.ranges import Spans, covers
from ..errors import AdoptionFailed, CumemSleepError, InvalidState, counted, format_bytes
from ..for_plugin import kept_names
from . import droppable
from .file_digests import FileDigest, digests_of
from .reached import Reached

logger = logging.getLogger("cumem_sleep")

LOAD_FORMAT = "cumem_sleep"
_ALIGNMENT = 16  # of what may be offered; PyTorch's blocks end at a multiple of 512
# They say how weights are quantised, are a model's code, or are merged into its weights (Jina's embeddings v5).
_FILES_BESIDE = ("*.json", "*.py", "adapters/*/*")
_MOST_MODEL_NAME = 100  # characters
_SMALL_BYTES = 4096  # a scale, or one for each row


@dataclass(frozen=True)
class _Weights:
    """What this rank can offer or adopt.

    Attributes:
        name: that they have in the vault; it holds a digest of all that decides their bytes.
        places: the address and the bytes of each storage.
        files: what they were digested from.
        small: what small parameters were made with: the scales of an fp8 model's KV cache, say, which few files have.
        are_kept: whether the vault has something of that name.
        why_not: they can be neither offered nor adopted, and why; then the others mean nothing.
    """

    name: str = ""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    files: list[tuple[Path, FileDigest]] = field(default_factory=list)
    small: dict[str, bytes] = field(default_factory=dict)
    are_kept: bool = False
    why_not: str = ""

    @property
    def bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.places.values())


class _Spoilt(Exception):
    """The tensors of this rank or of another were not filled as they should be."""


@register_model_loader(LOAD_FORMAT)
class VaultLoader(DefaultModelLoader):  # type: ignore[misc]
    """VLLM's own loader, where the vault does not have what it would load."""

    def __init__(self, load_config: Any) -> None:
        own = copy(load_config)
        own.load_format = "auto"
        super().__init__(own)
        self._building: tuple[Any, str] | None = None  # the engine's config and a prefix; None: load from files
        self._layers_before: list[Any] = []  # of the model that a draft model is for

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """As vLLM's. A model whose adoption has failed is built anew."""
        compilation = vllm_config.compilation_config
        lists = compilation.static_forward_context, getattr(compilation, "static_all_moe_layers", [])
        first = copy(lists[0]), copy(lists[1])  # where layers put themselves while they are made
        quantisation = deepcopy(vllm_config.quant_config)  # a model renames the layers in it to its own names
        self._building, self._layers_before = (vllm_config, prefix), list(first[0].values())
        try:
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        except _Spoilt as error:
            logger.error("cumem-sleep: the model is built anew and loaded from its files: %s", error)
        finally:
            self._building, self._layers_before = None, []
        vllm_config.quant_config = quantisation
        lists[0].clear()
        lists[0].update(first[0])
        lists[1][:] = first[1]
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Into a model that `load_model` builds, from the vault if it can be; into any other from files."""
        if self._building is None:
            super().load_weights(model, model_config)
            return
        began = time.monotonic()
        weights = self._weights(model, model_config)
        by_rank = _of_all_ranks((weights.are_kept, weights.why_not))
        if all(are_kept for are_kept, _ in by_rank):
            if failures := list(filter(None, _of_all_ranks(_adopt(weights)))):
                for each in model.parameters():  # whoever still has this model: the next one needs its memory
                    each.data = each.data.new_empty(0)
                raise _Spoilt("; ".join(failures))
            took_s = time.monotonic() - began
            logger.info("cumem-sleep: adopted %s of weights in %.2f s", format_bytes(weights.bytes), took_s)
            return
        why_not = next((why for _, why in by_rank if why), "")
        storages = {address for address, _ in weights.places.values()}
        before = None if why_not else _reached(model, storages, self._layers_before)
        super().load_weights(model, model_config)
        if before is not None:
            after = _reached(model, storages, self._layers_before)
            mine = _not_written(model, weights.small) or _changed(before, after) or _files_changed(weights.files)
            why_not = next(filter(None, _of_all_ranks(mine)), "")
        if why_not:
            logger.warning("cumem-sleep: loaded from files, and not offered to the vault: %s", why_not)
        else:
            _offer(weights)

    def _weights(self, model: Any, model_config: Any) -> _Weights:
        try:
            if CuMemAllocator.instance is None:
                raise InvalidState("this worker's memory does not come from this layer: --enable-sleep-mode")
            names = kept_names(CuMemAllocator.instance)
            places = _places(model)
            files = self._files(model, model_config)
            name = self._name(model, model_config, files)
            return _Weights(name, places, files, dict(_small(model)), name in names)
        except Exception as error:  # whatever it is: vLLM's own loader finds it, too, or it does not matter to that
            return _Weights(why_not=str(error) or repr(error))

    def _files(self, model: Any, model_config: Any) -> list[tuple[Path, FileDigest]]:
        """All that vLLM's loader may read for this model, in order."""
        for config in (model_config.hf_config, model_config.hf_text_config):
            if getattr(config, "classifier_from_token", None) is not None:
                raise InvalidState("the tokenizer, too, decides what is loaded (classifier_from_token)")
        paths: list[Path] = []

        def note(source: Any) -> Iterator[Any]:
            folder, files, *_ = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            beside = [path for pattern in _FILES_BESIDE for path in Path(folder).glob(pattern)]
            paths.extend((*sorted(map(Path, files)), *sorted(beside)))
            return iter(())

        self._get_weights_iterator = note
        try:
            deque(self.get_all_weights(model_config, model), maxlen=0)
        finally:
            del self._get_weights_iterator
        return list(zip(paths, digests_of(paths), strict=True))

    def _name(self, model: Any, model_config: Any, files: list[tuple[Path, FileDigest]]) -> str:
        """Of all that decides which bytes vLLM's own loader would leave in which tensor of this rank.

        `compute_hash` is of what shapes vLLM's graphs, and has 40 bits: so what it leaves out of ranks, of the model's
        configuration and of the environment is added, and the longer hashes that it is made of.
        """
        import vllm
        from vllm import envs
        from vllm.platforms import current_platform

        assert self._building is not None
        config, prefix = self._building
        ranks = _ranks(config.parallel_config)
        facts = {
            "files": [(path.name, each.digest) for path, each in files],
            "hf_config": model_config.hf_config.to_dict(),
            "hashes": [each.compute_hash() for each in (config, model_config, config.parallel_config)],
            "multimodal": getattr(model_config, "multimodal_config", None),
            "quantisation": [model_config.quantization, type(config.quant_config).__qualname__],
            "dtype": model_config.dtype,
            "environment": envs.compile_factors(),
            "code": _code(model),
            "versions": [torch.__version__, vllm.__version__, __version__],
            "device": current_platform.get_device_name(),
            "ranks": ranks,
            "prefix": prefix,
            "layout": _layout(model),
        }
        digest = sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()
        label = "".join(filter(str.isprintable, Path(model_config.model).name))[:_MOST_MODEL_NAME]
        return f"{label}, rank {ranks['tp'][0]} of {ranks['tp'][1]}: {digest}"


# Parameters


def _places(model: Any) -> dict[str, tuple[int, int]]:
    """The storages of all parameters, each by the name of its first one.

    Raises:
        InvalidState: one holds other bytes as well, or none.
    """
    names: dict[int, str] = {}
    sizes: dict[int, int] = {}
    covered: dict[int, Spans] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            if (found := droppable.span(parameter)) is None:
                raise InvalidState(f"parameter {name} does not lie in one piece of memory")
            address, nbytes, piece = found
            names.setdefault(address, name)
            sizes[address] = nbytes
            covered.setdefault(address, []).append(piece)
    for address, name in names.items():
        if not covers(covered[address], sizes[address]):
            raise InvalidState(f"parameter {name} shares its memory with what is no parameter")
    return {name: (address, -(-sizes[address] // _ALIGNMENT) * _ALIGNMENT) for address, name in names.items()}


def _layout(model: Any) -> list[Any]:
    """How parameters lie in their storages, and which share one."""
    numbers: dict[int, int] = {}
    layout = []
    for name, each in model.named_parameters(remove_duplicate=False):
        number = numbers.setdefault(each.untyped_storage().data_ptr(), len(numbers))
        where = number, each.untyped_storage().nbytes(), each.storage_offset(), each.stride()
        layout.append((name, type(each).__qualname__, each.dtype, tuple(each.shape), *where))
    return layout


def _small(model: Any) -> Iterator[tuple[str, bytes]]:
    for name, each in model.named_parameters(remove_duplicate=False):
        if each.nbytes <= _SMALL_BYTES:
            yield name, each.data.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _not_written(model: Any, small: dict[str, bytes]) -> str:
    """The parameters that the model's own `load_weights` did not say that it has written, in words.

    But for `small` ones that are as they were: where they are adopted they were made with the same.
    """
    written = getattr(model, droppable.WRITTEN, None)
    if written is None:
        return "its load_weights does not say what it has written"
    named = list(model.named_parameters(remove_duplicate=False))
    tied = {id(each) for name, each in named if name in written}
    as_made = {name for name, content in _small(model) if content == small.get(name)}
    if others := [name for name, each in named if id(each) not in tied and name not in as_made]:
        return f"load_weights did not write {others[0]} ({counted(len(others), 'parameter')} in all)"
    if others := sorted(written - {name for name, _ in named}):
        return f"load_weights wrote {others[0]}, which is no parameter"
    return ""


def _reached(model: Any, storages: set[int], beyond: Iterable[Any]) -> Reached | str:
    """Or why not: a model may have anything, such as a proxy of what is gone."""
    try:
        return Reached(model, storages, (droppable.WRITTEN,), beyond)
    except Exception as error:
        return f"cannot tell what loading changes: {error!r}"


def _changed(before: Reached | str, after: Reached | str) -> str:
    if isinstance(before, str):
        return before
    if isinstance(after, str):
        return after
    path = before.change_to(after)
    return path and f"loading has changed more than parameters' bytes: {path}"


# The rest of the key


def _code(model: Any) -> list[Any]:
    """The model's class, and the digests of the sources of all modules, and of what these and parameters have: methods
    of quantisation and weight loaders write parameters, and may be a plugin's.
    """
    owners = [*model.modules(), *model.parameters()]
    values = [value for each in owners for value in (each, *vars(each).values())]
    names = {each.__module__ for value in values for each in type(value).__mro__}
    names |= {name for each in values if isinstance(name := getattr(each, "__module__", None), str)}  # of functions
    sources = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    digests = digests_of(sorted(filter(None, sources)))
    return [f"{type(model).__module__}.{type(model).__qualname__}", sorted(each.digest for each in digests)]


def _ranks(parallel: Any) -> dict[str, tuple[int, int]]:
    """The rank, and how many there are, in each way to cut a model up. Replicas have the same."""
    from vllm.distributed import parallel_state

    found = {}
    for way in ("tp", "pp", "pcp"):
        if (get := getattr(parallel_state, f"get_{way}_group", None)) is not None:
            found[way] = get().rank_in_group, get().world_size
    if parallel.enable_expert_parallel:
        found["dp"] = parallel.data_parallel_rank, parallel.data_parallel_size
    return found


def _files_changed(files: list[tuple[Path, FileDigest]]) -> str:
    try:
        now = digests_of(path for path, _ in files)
    except CumemSleepError as error:
        return str(error)
    return next(
        (f"{path} has changed meanwhile" for (path, old), new in zip(files, now, strict=True) if old != new), ""
    )


# Between ranks, and with the vault


def _of_all_ranks(value: Any) -> list[Any]:
    """What each rank of the tensor-parallel group says: those that load the same layers at the same time."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _adopt(weights: _Weights) -> str:
    """Why not; "" if they are there."""
    try:
        adopted = CuMemAllocator.get_instance().adopt(weights.name, weights.places)
        return "" if adopted else f"the vault does not keep {weights.name!r} any more"
    except CumemSleepError as error:
        return error.why if isinstance(error, AdoptionFailed) else str(error)


def _offer(weights: _Weights) -> None:
    began = time.monotonic()
    try:
        CuMemAllocator.get_instance().offer(weights.name, weights.places)
    except CumemSleepError as error:
        logger.warning("cumem-sleep: the vault does not keep these weights: %s", error)
        return
    took_s = time.monotonic() - began
    logger.info("cumem-sleep: offered %s of weights to the vault in %.2f s", format_bytes(weights.bytes), took_s)
