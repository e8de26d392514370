"""What a process of vLLM that was just spawned finds, step by step; too slow to start one for every question."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection


@dataclass
class Findings:
    """Sent from the spawned process.

    Attributes:
        ours_without_plugins: the layer's modules after vLLM loaded no plugin, or only another one.
        vllm_when_disabled: vLLM's modules that loading the disabled layer imported.
        imported: modules that loading the layer imported, beyond what an engine had imported before, and its own.
        threads: begun by loading the layer.
        cuda_initialized: by loading the layer.
        replaced: whether vLLM's allocator is the layer's.
        error: what kept it from finding out.
    """

    ours_without_plugins: list[str] = field(default_factory=list)
    vllm_when_disabled: list[str] = field(default_factory=list)
    imported: list[str] = field(default_factory=list)
    threads: int = 0
    cuda_initialized: bool = False
    replaced: bool = False
    error: str = ""


def investigate(connection: Connection) -> None:
    """Target of a spawned process, whose environment has the simulated CUDA platform."""
    findings = Findings()
    try:
        _investigate(findings)
    except BaseException as error:
        findings.error = repr(error)
    connection.send(findings)
    connection.close()


def _investigate(findings: Findings) -> None:
    import vllm.plugins

    def load(**environment: str) -> list[str]:
        """The modules that this imported."""
        os.environ.update(environment)
        before = set(sys.modules)
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        return sorted(set(sys.modules) - before)

    assert not any(name.split(".")[0] == "cumem_sleep" for name in sys.modules), "not a fresh process"
    for others in ("", "simulated_cuda"):
        findings.ours_without_plugins += [n for n in load(VLLM_PLUGINS=others) if n.startswith("cumem_sleep")]
    os.environ["VLLM_PLUGINS"] = "cumem_sleep,simulated_cuda"  # not vLLM's own, which import much
    findings.vllm_when_disabled = [n for n in load(CUMEM_SLEEP_DISABLE="1") if n.split(".")[0] == "vllm"]
    del os.environ["CUMEM_SLEEP_DISABLE"]

    import vllm.v1.engine.async_llm

    threads = threading.active_count()
    findings.imported = [n for n in load() if n.split(".")[0] != "cumem_sleep"]
    findings.threads = threading.active_count() - threads
    import torch
    from vllm.device_allocator import cumem

    findings.cuda_initialized = torch.cuda.is_initialized()
    findings.replaced = cumem.CuMemAllocator.__module__ == "cumem_sleep.allocator"
