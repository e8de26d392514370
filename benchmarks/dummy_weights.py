"""Weights in the place of vLLM's and SGLang's dummy ones, which are so small that tokens hardly depend on anything."""

from __future__ import annotations

from typing import Any


def fill(model: Any, seed: int = 0) -> int:
    """Such that every layer adds about as much as the others: what attention reads changes the tokens.

    Returns the bytes that were written.
    """
    import torch

    written, tied = 0, bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        written += parameter.nbytes
        if parameter.dim() == 1:
            parameter.data.fill_(1)
            continue
        # An embedding that is the head, too, would else repeat the last token, whatever was attended to.
        is_table = "embed" in name and not tied
        bound = (3 / (1 if is_table else parameter.shape[-1])) ** 0.5
        generator = torch.Generator(device=parameter.device).manual_seed(seed << 32 | number)
        parameter.data.uniform_(-bound, bound, generator=generator)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return written
