"""docs/frameworks.md with the real packages, as far as they are installed; models are simulated, no GPU is used."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from snippets import ROOT, Snippet, snippet_at
from support import two_free_ports

import cumem_sleep

pytestmark = [pytest.mark.frameworks, pytest.mark.sim]
WITHIN_S = 300.0
PROGRAMS = ROOT / "examples" / "frameworks"
MESSAGES = [{"role": "user", "content": "Who are you?"}]


def needs(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


def written(folder: pathlib.Path, snippet: Snippet, name: str, **changes: str) -> pathlib.Path:
    """A block of the page as a file."""
    text = snippet.text
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


@contextlib.contextmanager
def running(folder: pathlib.Path, *command: str | pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    package = str(pathlib.Path(cumem_sleep.__path__[0]).parent)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as home, (folder / "said").open("ab") as said:  # short: sockets are in it
        variables = {**os.environ, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": package, "HOME": home, "PATH": path}
        process = subprocess.Popen([*map(str, command)], stdout=said, stderr=said, env=variables, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()
            print((folder / "said").read_text()[-3000:])


def asked(url: str, body: Any = None, process: subprocess.Popen[bytes] | None = None) -> Any:
    """What is answered; of a process that starts, as soon as it answers."""
    ends_at = time.monotonic() + WITHIN_S
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    while True:
        try:
            with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
                return json.load(answer)
        except OSError:
            if process is None or process.poll() is not None or time.monotonic() > ends_at:
                raise
            time.sleep(0.5)


@contextlib.contextmanager
def fronting(folder: pathlib.Path, *arguments: str | pathlib.Path) -> Iterator[str]:
    (folder / "front").mkdir()
    command = (sys.executable, "-m", "cumem_sleep", "serve", *arguments, "--port", "0")
    with running(folder / "front", *command) as process:
        while (found := re.search(r"listens at (http://\S+);", (folder / "front" / "said").read_text())) is None:
            assert process.poll() is None
            time.sleep(0.1)
        yield found[1]


@pytest.fixture
def front(tmp_path: pathlib.Path) -> Iterator[str]:
    """The address of the demo's."""
    with fronting(tmp_path, "--demo") as url:
        yield url


def phase(front: str, name: str) -> tuple[str, list[int]]:
    """A model's, and what runs of its server's program."""
    (model,) = (each for each in asked(f"{front}/v1/models")["data"] if each["id"] == name)
    found = [int(each) for each in os.listdir("/proc") if each.isdecimal() and _runs_triton(each)]
    return model["state"], found


def _runs_triton(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return b"tritonserver\0" in pathlib.Path("/proc", pid, "cmdline").read_bytes()
    return False


def test_clients_of_openais_api(front: str, capfd: pytest.CaptureFixture[str]) -> None:
    needs("openai", "litellm")
    text = snippet_at("frameworks", "import litellm").text
    assert "http://localhost:8000" in text
    exec(text.replace("http://localhost:8000", front), {})
    assert capfd.readouterr().out.count("This is qwen-8b, a simulated model") == 2
    import openai

    with openai.OpenAI(base_url=f"{front}/models/embedder/v1", api_key="none", timeout=WITHIN_S) as client:
        assert [model.id for model in client.models.list()] == ["embedder"]
        assert client.embeddings.create(model="embedder", input="text").data[0].embedding
        with pytest.raises(openai.NotFoundError, match="no model"):
            openai.OpenAI(base_url=f"{front}/models/nobody/v1", api_key="none").models.list()


def test_the_client_of_ollama_hears_that_its_api_is_not_there(front: str) -> None:
    needs("ollama")
    import ollama

    with pytest.raises(ollama.ResponseError, match="there is no path '/api/chat' here"):
        ollama.Client(host=front).chat("qwen-8b", MESSAGES)


def test_before_the_front_mlflows_gateway(front: str, tmp_path: pathlib.Path) -> None:
    needs("mlflow")
    port = str(two_free_ports())
    written(tmp_path, snippet_at("frameworks", "endpoint_type"), "gateway.yaml", **{"http://localhost:8000": front})
    command = shlex.split(snippet_at("frameworks", "mlflow gateway start").text.replace("5000", port))
    with running(tmp_path, *command) as process:
        url = f"http://127.0.0.1:{port}"
        asked(f"{url}/health", process=process)
        said = asked(f"{url}/gateway/chat/invocations", {"messages": MESSAGES})
        assert said["choices"][0]["message"]["content"].startswith("This is qwen-8b")
        assert asked(f"{url}/gateway/embeddings/invocations", {"input": "text"})["data"][0]["embedding"]


def test_before_the_front_kserves_model_server(front: str, tmp_path: pathlib.Path) -> None:
    needs("kserve", "vllm")
    port = str(two_free_ports())
    with running(tmp_path, sys.executable, PROGRAMS / "kserve_front.py", port, front, "qwen-8b", "qwen-14b") as process:
        url = f"http://127.0.0.1:{port}"
        asked(f"{url}/v2/health/ready", process=process)
        for name in ("qwen-8b", "qwen-14b"):
            said = asked(f"{url}/openai/v1/chat/completions", {"model": name, "messages": MESSAGES})
            assert said["choices"][0]["message"]["content"].startswith(f"This is {name}")
        body = json.dumps({"model": "qwen-8b", "messages": MESSAGES, "stream": True}).encode()
        request = urllib.request.Request(
            f"{url}/openai/v1/chat/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WITHIN_S) as stream:
            *events, done = stream.read().decode().split("\n\n")[:-1]
        assert done == "data: [DONE]"
        said = "".join(json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events)
        assert said.startswith("This is qwen-8b")


def test_kserves_manifest_fits_its_schema() -> None:
    """`KSERVE_CRD`: its config/crd/full/serving.kserve.io_inferenceservices.yaml."""
    needs("jsonschema", "yaml")
    if "KSERVE_CRD" not in os.environ:
        pytest.skip("needs KSERVE_CRD")
    import jsonschema
    import yaml

    crd = yaml.safe_load(pathlib.Path(os.environ["KSERVE_CRD"]).read_text())
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1beta1")
    manifest = yaml.safe_load(snippet_at("frameworks", "kind: InferenceService").text)
    jsonschema.validate(manifest, closed(schema))


def closed(schema: Any) -> Any:
    """A cluster drops what its schema does not name: here that is an error, and so are Kubernetes' numbers as text."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and schema["properties"]:
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        found.setdefault("additionalProperties", bool(is_open))
    return found


def test_behind_the_front_triton_is_stopped_and_started(tmp_path: pathlib.Path) -> None:
    needs("pytriton", "yaml")
    triton_port = str(two_free_ports())
    changes = {
        "python triton_server.py": f"{sys.executable} {PROGRAMS}/triton_server.py",
        "9001": triton_port,
        "5m": "3s",
    }
    recipe = snippet_at("frameworks", "command: python triton_server.py")
    models = written(tmp_path, recipe, "models.yaml", **changes)
    with fronting(tmp_path, models) as front:
        seen = set()
        for _ in range(2):
            said = asked(f"{front}/v1/completions", {"model": "triton", "prompt": "hello"})
            assert said["choices"][0]["text"] == "Triton heard hello"
            state, servers = phase(front, "triton")
            assert (state, len(servers)) == ("awake", 1)
            import tritonclient.http

            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton_port}") as client:
                assert client.is_model_ready("model")
            seen.update(servers)
            while phase(front, "triton")[0] != "stopped":
                time.sleep(0.2)
            assert phase(front, "triton")[1] == []
        assert len(seen) == 2
