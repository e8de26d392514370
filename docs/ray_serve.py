"""One model on two GPUs behind Ray Serve, a server on each: see several-models.md. Run: serve run ray_serve:app."""

import asyncio
import os
import socket
import subprocess

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

GATE = "--middleware cumem_sleep.vllm.SleepGate"
COMMAND = f"vllm serve Qwen/Qwen3-8B --enable-sleep-mode {GATE} --host 127.0.0.1 --port"


class Server:
    """One vLLM server. It is a deployment of its own, since a call of a deployment reaches any one of its replicas."""

    def __init__(self, token: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "CUMEM_SLEEP_ADMIN_TOKEN": token}
        self.process = subprocess.Popen([*COMMAND.split(), str(port)], env=environment)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)

    def check_health(self) -> None:
        """Ray asks this, and starts another server where it raises."""
        if self.process.poll() is not None:
            raise RuntimeError("the server has ended")

    def __del__(self) -> None:
        self.process.terminate()

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes):
        """Its answer: the status and the content's type first, then the content, piece by piece."""
        try:
            async with self.client.stream(method, path, content=body, headers=headers) as answer:
                yield answer.status_code, answer.headers.get("content-type")
                async for piece in answer.aiter_raw():
                    yield piece
        except httpx.ConnectError:
            yield 503, None  # it still starts


@serve.deployment
class Front:
    """Passes requests for the model on to one server, and everything else to all of them."""

    def __init__(self, *servers) -> None:
        self.servers = [server.options(stream=True) for server in servers]
        self.asked = 0

    async def __call__(self, request: Request) -> Response:
        """The answer of one server; where all are asked, an error or "awake" if any of them says so."""
        path = f"{request.url.path}?{request.url.query}"
        headers = {name: request.headers[name] for name in ("content-type", "authorization") if name in request.headers}
        call = request.method, path, headers, await request.body()
        if request.method == "POST" and request.url.path.startswith("/v1/"):
            self.asked += 1
            pieces = aiter(self.servers[self.asked % len(self.servers)].ask.remote(*call))
            status, kind = await anext(pieces)
            return StreamingResponse(pieces, status, media_type=kind)
        answers = await asyncio.gather(*(whole(server.ask.remote(*call)) for server in self.servers))
        return max(answers, key=lambda answer: (answer.status_code, b"false" in answer.body))


async def whole(pieces) -> Response:
    """An answer, when all of it is there."""
    (status, kind), *content = [piece async for piece in pieces]
    return Response(b"".join(content), status, media_type=kind)


servers = [
    serve.deployment(Server).options(name=f"server-{gpu}", ray_actor_options={"num_gpus": 1}) for gpu in range(2)
]
app = Front.bind(*(server.bind(os.environ["CUMEM_SLEEP_ADMIN_TOKEN"]) for server in servers))
