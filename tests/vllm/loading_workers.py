"""A script: workers that load a small model of vLLM's, on the simulated driver; says how that went.

It reads orders, a line of JSON each, and answers with a line: what each rank says, or null where it was killed. Each
worker is a fork: importing vLLM takes very long.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from vllm import plugins
from vllm.config import DeviceConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

import cumem_sleep
from cumem_sleep import CuMemAllocator
from cumem_sleep.vault.client import VaultClient

PAGE = 2 << 20

# There is no device to communicate with.
type(current_platform).get_device_communicator_cls = classmethod(
    lambda _: "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)


def replace_parameter(model: Any) -> None:
    """By another object that is the same in all else."""
    norm, before = model.model.norm, model.model.norm.weight
    norm.weight = torch.nn.Parameter(before.data, before.requires_grad)
    vars(norm.weight).update(vars(before))


def move_parameter(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.clone()


def write_file(model: Any) -> None:
    """Another byte, of the same size and with the same time of modification."""
    facts = MODEL_FILE.stat()
    content = bytearray(MODEL_FILE.read_bytes())
    content[-1] ^= 1
    MODEL_FILE.write_bytes(content)
    os.utime(MODEL_FILE, ns=(facts.st_atime_ns, facts.st_mtime_ns))


class Gone(dict[str, Any]):
    """Looking into it raises, as with a proxy of what has gone."""

    def __len__(self) -> int:
        raise ReferenceError


MODEL_FILE = Path()
LOADS: list[int] = []  # no closure's: what a model reaches may not change
ATTENTION = "model.layers.1.self_attn.attn"

# What a model's `load_weights` does beside its work, and what it says it has written.
ALSO: dict[str, Callable[[Any], object]] = {
    "sets a value": lambda model: setattr(model.model, "scale", 2.0),
    "changes a value": lambda model: setattr(model.get_submodule(ATTENTION), "_k_scale_float", 2.0),
    "writes a buffer": lambda model: model.get_submodule(ATTENTION)._k_scale.fill_(2.0),
    "writes a tensor that is no buffer": lambda model: model.tensors[0].fill_(2.0),
    "fills a list": lambda model: model.config.architectures.append("Other"),
    "writes to a set": lambda model: model.names.add("other"),
    "writes to an array": lambda model: model.array.__setitem__(0, 1),
    "changes what a function knows": lambda model: model.known(2),
    "changes a class": lambda model: setattr(LlamaForCausalLM, "scale", 2.0),
    "replaces a parameter": replace_parameter,
    "moves a parameter": move_parameter,
    "loses what it has": lambda model: setattr(model, "gone", Gone()),
    "writes its file": write_file,
    "writes what no file has": lambda model: model.scale.data.fill_(2.0),
}
SAYS: dict[str, Callable[[set[str]], Any]] = {
    "says nothing": lambda _: None,
    "leaves one out": lambda written: written - {"model.layers.0.mlp.down_proj.weight"},
    "names what is no parameter": lambda written: written | {f"{ATTENTION}._k_scale"},
}


def other_code(config: Any) -> None:
    """Of the model, in a file of its own."""
    LlamaForCausalLM.__module__ = "loading_workers"


class Method(UnquantizedLinearMethod):  # type: ignore[misc]
    """Of a plugin."""


class Quantisation(QuantizationConfig):  # type: ignore[misc]
    """Whose model renames the layers that it ignores, and would again (as Step3p5's and Falcon-H1's do)."""

    ignored = "mamba"
    get_name = get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = None

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return Method() if isinstance(layer, LinearBase) else None


def quantise(config: Any, module: str = __name__) -> None:
    config.quant_config = Quantisation()
    Method.__module__ = module


def other_version(config: Any) -> None:
    from cumem_sleep.vllm import vault_loader

    vault_loader.__version__ = "0"


# What lets the same files become other weights.
OTHERS: dict[str, Callable[[Any], object]] = {
    "hf_config": lambda config: setattr(config.model_config.hf_config, "rope_theta", 5.0),
    "hf_overrides": lambda config: setattr(config.model_config.hf_config, "anything", 1),
    "dtype": lambda config: setattr(config.model_config, "dtype", torch.float16),
    "environment": lambda _: os.environ.update(VLLM_USE_DEEP_GEMM="0"),
    "code": other_code,
    "version": other_version,
    "quantisation": quantise,
    "quantisation's code": lambda config: quantise(config, "csv"),
    "classifier": lambda config: setattr(config.model_config.hf_config, "classifier_from_token", ["Yes"]),
    "another model": lambda config: config.compilation_config.static_forward_context.update(another=Gone()),
    "expert parallel": lambda config: setattr(config.parallel_config, "enable_expert_parallel", True),
}


class Worker:
    """Stands for vLLM's worker, around its real loaders."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model: Any = None

    def init_device(self) -> None:
        from vllm.model_executor.model_loader import get_model_loader

        get_model_loader(self.config.load_config)  # as from 0.33 on

    def load_model(self) -> None:
        with set_current_vllm_config(self.config):
            self.model = get_model(vllm_config=self.config)

    def get_model(self) -> Any:
        return self.model


class Building:
    """Models are built in simulated device memory; in another order, at other addresses, if told so.

    Args:
        ours: False: in no memory of this layer.
    """

    def __init__(self, elsewhere: bool, ours: bool) -> None:
        self.built = 0
        self.alive = 0  # tensors of those before, when one was built
        self._blocks: list[weakref.ref[Any]] = []
        self._elsewhere, self._ours, self._make = elsewhere, ours, base_loader.initialize_model
        vars(base_loader)["initialize_model"] = self.build

    def build(self, *args: Any, **kwargs: Any) -> Any:
        self.alive += sum(each() is not None for each in self._blocks)
        model = self._make(*args, **kwargs)
        self.built += 1
        if (quantisation := kwargs["vllm_config"].quant_config) is not None:
            quantisation.ignored = quantisation.ignored.replace("mamba", "mamba.mamba", 1)
        model.scale = torch.nn.Parameter(torch.tensor(0.0), requires_grad=False)
        if self._ours:
            self._place(model)
        model.scale.data.fill_(-1.0)  # no file has it
        model.tensors, model.names, model.array, model.known = [torch.ones(2)], {"one"}, bytearray(2), knowing()
        return model

    def _place(self, model: Any) -> None:
        storages: dict[int, list[Any]] = {}
        for each in model.parameters():
            storages.setdefault(each.untyped_storage().data_ptr(), []).append(each)
        sizes = [-(-those[0].untyped_storage().nbytes() // 512) * 512 for those in storages.values()]
        begin = 512 if self._elsewhere else 0
        segment = CuMemAllocator.get_instance().malloc(-(-(begin + sum(sizes)) // PAGE) * PAGE, "weights")
        pairs = list(zip(storages.values(), sizes, strict=True))
        for those, size in reversed(pairs) if self._elsewhere else pairs:
            block = (ctypes.c_char * those[0].untyped_storage().nbytes()).from_address(segment + begin)
            self._blocks.append(weakref.ref(block))
            storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
            for each in those:
                moved = torch.empty(0, dtype=each.dtype)
                each.data = moved.set_(storage, each.storage_offset(), each.shape, each.stride())  # type: ignore[call-overload]
                each.data.fill_(float("nan"))
            begin += size


def knowing() -> Callable[[int], None]:
    known = 1

    def know(value: int) -> None:
        nonlocal known
        known = value

    return know


def kill_at(request: int, victim: int) -> list[str]:
    """Kill a process before this request to the vault, the first being 1; returns those that are sent."""
    begin = VaultClient._begin
    sent: list[str] = []

    def counted(client: VaultClient, verb: str, *args: Any, **facts: Any) -> int:
        sent.append(verb)
        if len(sent) == request:
            os.kill(victim, signal.SIGKILL)
        return begin(client, verb, *args, **facts)

    VaultClient._begin = counted  # type: ignore[method-assign,assignment]
    return sent


def load(order: dict[str, Any], rank: int, answer: Connection) -> None:
    """In a worker of its own."""
    said: list[str] = []
    log = logging.getLogger("cumem_sleep")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    os.environ["CUMEM_SLEEP_VAULT"] = order["vault"]
    config = copy.deepcopy(CONFIG)
    config.model_config.model = order["model"]
    config.load_config.load_format = order.get("format", "cumem_sleep")
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = size = order.get("ranks", 1)
    global MODEL_FILE
    MODEL_FILE = Path(order["model"]) / "model.safetensors"
    OTHERS.get(order.get("other", ""), lambda _: None)(config)
    requests = kill_at(order.get("kill_at", 0), order.get("victim") or os.getpid())
    with set_current_vllm_config(config):
        where = f"file://{order['meeting']}"
        parallel_state.init_distributed_environment(size, rank, where, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(size, 1)
    building = Building(order.get("elsewhere", False), order.get("ours", True))
    own = LlamaForCausalLM.load_weights

    def load_weights(model: Any, weights: Any) -> Any:
        written = own(model, weights)
        LOADS.append(len(written))
        odd = order.get("odd", "") if rank == order.get("odd_rank", 0) else ""
        ALSO.get(odd, lambda _: None)(model)
        return SAYS.get(odd, lambda written: written)(written)

    LlamaForCausalLM.load_weights = load_weights
    DefaultModelLoader.track_weights_loading = lambda *_args, **_options: None  # as where a model is quantised
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.vllm_config, wrapper.worker, wrapper._worker_extension_cls = config, Worker(config), None
    wrapper.init_device()
    wrapper.load_model()
    model = wrapper.worker.model
    state = hashlib.sha256()
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        state.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
        state.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    answer.send(
        {
            "state": state.hexdigest(),
            "log": said,
            "requests": requests,
            "loads": len(LOADS),
            "builds": building.built,
            "copied": CuMemAllocator.get_instance().sleep().copied_bytes if order.get("sleep") else None,
            "alive": building.alive,
            "layers": len(config.compilation_config.static_forward_context.keys() - {"another"}),
            "ignored": getattr(config.quant_config, "ignored", None),
            "modules": [name for name in sys.modules if name.startswith("vllm.")],
        }
    )
    os._exit(0)


def answers(order: dict[str, Any]) -> list[dict[str, Any] | None]:
    fork, workers = multiprocessing.get_context("fork"), []
    for rank in range(order.get("ranks", 1)):
        receiver, sender = fork.Pipe(duplex=False)
        workers.append((fork.Process(target=load, args=(order, rank, sender)), receiver))
        workers[-1][0].start()
        sender.close()
    said = []
    for process, receiver in workers:
        try:
            said.append(receiver.recv())
        except EOFError:
            said.append(None)
        process.join()
    for name in [name for each in said if each for name in each.pop("modules")]:  # in the order of their imports
        importlib.import_module(name)  # what one needs, the next ones need, too
    Path(order["meeting"]).unlink(missing_ok=True)
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not outlive a fork
    plugins.load_general_plugins()
    CONFIG = EngineArgs(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enforce_eager=True,
        max_model_len=64,
        distributed_executor_backend="uni",
    ).create_engine_config()
    CONFIG.device_config = DeviceConfig(device="cpu")
    assert cumem_sleep.__file__
    for line in sys.stdin:
        print("\n" + json.dumps(answers(json.loads(line))), flush=True)
