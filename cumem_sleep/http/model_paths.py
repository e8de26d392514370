"""Paths of vLLM's HTTP server that ask a model for something: what the gate and the front both need to know of them."""

from __future__ import annotations

RUNS_MODEL = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/invocations", "/inference/v1/generate", "/generate"),
    *("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/v1/embeddings", "/v2/embed", "/generative_scoring", "/cohere/v2/chat"),
    *("/v1/decisions", "/v1/systemone"),
)
# What needs the model's server, but none of its memory on a GPU.
NEEDS_SERVER = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel"),
    *("/v1/completions/render", "/v1/chat/completions/render"),
    *("/v1/messages/render", "/v1/responses/render", "/cohere/v2/chat/render"),
    *("/v1/completions/derender", "/v1/chat/completions/derender"),
)
