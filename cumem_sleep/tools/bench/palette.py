"""One colour for each thing, in the figure of `bench` and in those of benchmarks/, which load this file by its path.

The palette is that of Okabe and Ito, which works with any kind of colour vision, and in grey.
"""

from __future__ import annotations

OURS = "#0072B2"
OURS_LEVEL_2 = "#56B4E9"
OURS_VAULT = "#F0E442"
VLLM = "#E69F00"
TORCH_MEMORY_SAVER = "#CC79A7"
TORCH_MEMORY_SAVER_RETAINED = "#009E73"
RESTART = "#999999"
LINK = "#D55E00"

_BY_LABEL = {
    "cumem-sleep, level 2": OURS_LEVEL_2,
    "cumem-sleep, compressed": OURS_LEVEL_2,
    "cumem-sleep, the vault": OURS_VAULT,
    "cumem-sleep": OURS,
    "vLLM": VLLM,
    "torch_memory_saver, backups retained": TORCH_MEMORY_SAVER_RETAINED,
    "torch_memory_saver": TORCH_MEMORY_SAVER,
    "restart": RESTART,
    "the links alone": LINK,
}


def colour_of(label: str) -> str:
    """The colour of the layer, or of the way of switching, with this name in a legend.

    Raises:
        KeyError: no colour has been chosen for it.
    """
    for beginning, colour in _BY_LABEL.items():
        if label.startswith(beginning):
            return colour
    raise KeyError(f"{label!r} has no colour: choose one in cumem_sleep/tools/bench/palette.py")
