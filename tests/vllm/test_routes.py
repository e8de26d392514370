"""Each route of the installed vLLM is known to the gate, by the table that the documentation shows."""

from __future__ import annotations

import logging

import pytest
import route_table
from environment import skip_unless_vllm

skip_unless_vllm()


@pytest.fixture(scope="module")
def version(vllm_version: tuple[int, int]) -> str:
    version = f"{vllm_version[0]}.{vllm_version[1]}"
    if version not in route_table.VERSIONS:
        pytest.skip(f"docs/vllm-routes.md is of {', '.join(route_table.VERSIONS)}")
    return version


@pytest.fixture(scope="module")
def environment_of_servers() -> None:
    # What `apps` sets stays for this module alone.
    root = logging.getLogger()
    levels = {each: each.level for each in (root, *root.handlers)}
    with pytest.MonkeyPatch.context() as context:
        context.setenv("VLLM_SERVER_DEV_MODE", "1")
        context.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        # vLLM's parser loads plugins; ours would stay in this process, whose other tests load it themselves.
        context.setenv("VLLM_PLUGINS", "simulated_cuda")
        yield
    for each, level in levels.items():  # what a server imports raises those of pytest's own handlers as well
        each.setLevel(level)


def test_the_document_knows_the_routes_and_what_the_gate_does(version: str, environment_of_servers: None) -> None:
    text = route_table.DOCUMENT.read_text()
    documented = route_table.documented(text)
    assert route_table.installed_routes() == documented[version], "run tests/vllm/route_table.py, look at the diff"
    assert text == route_table.document(documented), "python tests/vllm/route_table.py"
    assert "not known" not in text.partition("| Routes |")[2], "classify it in cumem_sleep/vllm/routes.py"


def test_the_gate_finds_each_route_as_the_server_does(version: str, environment_of_servers: None) -> None:
    from cumem_sleep.vllm.routes import Routes, kind_of

    for app in route_table.apps():
        for path, method in route_table.routes_of(app):
            if method == "any":
                continue
            kind = "websocket" if method == "WEBSOCKET" else "http"
            concrete = path.replace("{", "").replace("}", "")
            scope = {"type": kind, "path": concrete, "root_path": "", "headers": [], "app": app}
            scope |= {} if kind == "websocket" else {"method": method}
            taken = Routes().take(app, scope)
            assert (taken.template, taken.kind) == (path, kind_of(method, path)), (path, method)
