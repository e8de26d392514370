"""Requests that vLLM answers with 4xx whatever its model does: they need not wake it.

Only what is cheap to see and the same in every version. A request that vLLM accepts after all wakes the model on its
way to the engine (`EngineDoor`).
"""

from __future__ import annotations

import json
from typing import Any

from ..http.asgi import Scope, header

_NEEDED = {  # one of them, and not empty
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/chat/completions": ("messages",),
    "/v1/chat/completions/batch": ("messages",),
    "/v1/messages": ("messages",),
}
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def will_be(scope: Scope, template: str, body: bytes) -> bool:
    """Whether vLLM will refuse this complete request to the route `template`."""
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json":
        return bool(kind) and not kind.startswith("multipart/")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return True
    if not isinstance(asked, dict):
        return True
    needed = _NEEDED.get(template, ())
    if needed and not any(asked.get(name) for name in needed):
        return True
    return any(_is_negative(asked.get(name)) for name in _COUNTS) or _is_of_nobody(scope, asked.get("model"))


def _is_negative(count: Any) -> bool:
    """As vLLM reads numbers: -1.0 and "-1", too."""
    try:
        return isinstance(count, (int, float, str)) and float(count) < 0
    except (ValueError, OverflowError):
        return False


def _is_of_nobody(scope: Scope, model: Any) -> bool:
    """Whether the server knows no model of this name."""
    models = getattr(scope["app"].state, "openai_serving_models", None)
    names = {str(getattr(path, "name", "")) for path in getattr(models, "base_model_paths", ())}
    names |= {str(name) for name in getattr(models, "lora_requests", ())}
    return bool(names) and isinstance(model, str) and model not in names
