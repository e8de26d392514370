"""Tables and plots of what was measured, which `benchmarks/result_tables.py` writes into docs/. One topic a file."""

from . import (
    bench,
    compressed,
    decoder,
    host_memory,
    peers,
    results,
    scenarios,
    serve_models,
    switching,
    torch_memory_saver,
    vault,
    vllm_level_3,
    vllm_serve,
)

__all__ = [
    "bench",
    "compressed",
    "decoder",
    "host_memory",
    "peers",
    "results",
    "scenarios",
    "serve_models",
    "switching",
    "torch_memory_saver",
    "vault",
    "vllm_level_3",
    "vllm_serve",
]
