"""KServe's predictor that asks a front: python kserve_front.py PORT URL MODEL... (docs/frameworks.md)."""

import os
import sys
from collections.abc import AsyncIterator

import httpx
from kserve import ModelServer
from kserve.protocol.rest.openai import OpenAIProxyModel


class ModelOfFront(OpenAIProxyModel):  # KServe 0.21 streams a generator of events, and this class's answer is none
    async def create_completion(self, *asked, **more):
        return events_of(await super().create_completion(*asked, **more))

    async def create_chat_completion(self, *asked, **more):
        return events_of(await super().create_chat_completion(*asked, **more))


def events_of(answer):
    return events(answer) if isinstance(answer, AsyncIterator) else answer


async def events(chunks):
    async for chunk in chunks:
        yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    port, url, *names = sys.argv[1:]
    headers = {"Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}"}
    client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(10, read=300))  # KServe's own waits for 30 s
    models = [ModelOfFront(name, url, client) for name in names]
    ModelServer(http_port=int(port), enable_grpc=False).start(models)
