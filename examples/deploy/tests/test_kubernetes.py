"""The Kubernetes manifests: against Kubernetes' schemas, and against each other."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
from rendered import DEPLOY, OVERLAYS, memory_bytes, of_kind, pods, resources

README = (DEPLOY / "README.md").read_text()
OLDEST, NEWEST = "1.29", "1.37"
overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def named(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A list of Kubernetes' named things, by name: no name twice."""
    found = {item["name"]: item for item in items}
    assert len(found) == len(items)
    return found


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@overlays
def test_every_resource_fits_the_schema_of_its_kind(overlay: str, version: str) -> None:
    assert f"Kubernetes {OLDEST} to {NEWEST}" in README
    for resource in resources(overlay):
        kubernetes_validate.validate(resource, version, strict=True)


@overlays
def test_an_overlay_has_what_the_cluster_needs(overlay: str) -> None:
    kinds = sorted((resource["kind"], resource["metadata"]["name"].split("-")[0]) for resource in resources(overlay))
    assert kinds == [
        ("ConfigMap", "models"),
        ("DaemonSet", "vault"),
        ("Deployment", "front"),
        ("Namespace", "cumem"),
        ("NetworkPolicy", "front"),
        ("NetworkPolicy", "vault"),
        ("PodDisruptionBudget", "front"),
        ("Service", "front"),
    ]
    namespaces = {found["metadata"].get("namespace") for found in resources(overlay) if found["kind"] != "Namespace"}
    assert namespaces == {*of_kind(overlay, "Namespace")}


@overlays
def test_selectors_find_the_pods_of_that_name_and_no_others(overlay: str) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay).items()}
    selecting = [resource for resource in resources(overlay) if resource["kind"] not in ("Namespace", "ConfigMap")]
    for resource in selecting:
        spec = resource["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = selector.get("matchLabels", selector)
        found = [name for name in labels if wanted.items() <= labels[name].items()]
        assert found == [resource["metadata"]["name"]], resource["kind"]


@overlays
def test_ports_mounts_and_configurations_that_are_named_exist(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        volumes = named(pod["spec"]["volumes"])
        (container,) = pod["spec"]["containers"]
        ports = named(container["ports"])
        for each in (container, *pod["spec"].get("initContainers", [])):
            assert {mount["name"] for mount in each["volumeMounts"]} <= {*volumes}
        for probe in ("readinessProbe", "livenessProbe"):
            assert probe not in container or container[probe]["httpGet"]["port"] in ports
        policy = of_kind(overlay, "NetworkPolicy")[name]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == {*ports}
        assert all(rule["from"] for rule in policy["ingress"])
        configured = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        assert configured <= {*of_kind(overlay, "ConfigMap")}
    (port,) = of_kind(overlay, "Service")["front"]["spec"]["ports"]
    assert port["targetPort"] in named(pods(overlay)["front"]["spec"]["containers"][0]["ports"])


@overlays
def test_the_vault_takes_the_memory_that_it_requests(overlay: str) -> None:
    (vault,) = pods(overlay)["vault"]["spec"]["containers"]
    assert vault["args"][:3] == ["vault", "--memory", "$(MEMORY)"]
    source = named(vault["env"])["MEMORY"]["valueFrom"]["resourceFieldRef"]
    assert source == {"resource": "requests.memory"}  # of this container, in bytes
    amounts = vault["resources"]
    assert memory_bytes(amounts["requests"]["memory"]) < memory_bytes(amounts["limits"]["memory"])


@overlays
def test_front_and_vault_share_a_user_and_the_folder_of_the_socket(overlay: str) -> None:
    specs = {name: pod["spec"] for name, pod in pods(overlay).items()}
    users = {spec["securityContext"]["runAsUser"] for spec in specs.values()}
    assert users == {int(found) for found in re.findall(r"--uid (\d+)", (DEPLOY / "image/Containerfile").read_text())}
    folders = {named(spec["volumes"])["vault"]["hostPath"]["path"] for spec in specs.values()}
    assert len(folders) == 1
    (vault,), (front,) = (specs[name]["containers"] for name in ("vault", "front"))
    (initial,) = specs["vault"]["initContainers"]
    for container in (vault, front, initial):
        assert named(container["volumeMounts"])["vault"]["mountPath"] == "/vault"
    assert named(front["env"])["CUMEM_SLEEP_VAULT"]["value"] == vault["args"][vault["args"].index("--socket") + 1]
    owner = dict(zip(initial["command"], initial["command"][1:], strict=False))
    assert {owner["-o"], owner["-g"]} == {str(user) for user in users}


@overlays
def test_secrets_are_named_and_nowhere_written_down(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    (front,) = pods(overlay)["front"]["spec"]["containers"]
    references = [env["valueFrom"]["secretKeyRef"] for env in front["env"] if "valueFrom" in env]
    for reference in references:
        assert f"create secret generic {reference['name']} " in README
        assert f"--from-literal={reference['key']}=" in README or reference.get("optional")
    assert {"api-key", "admin-token"} <= {reference["key"] for reference in references}


@overlays
def test_the_models_are_valid_and_open_to_others_only_with_a_key(overlay: str, tmp_path: pathlib.Path) -> None:
    (configuration,) = of_kind(overlay, "ConfigMap").values()
    check(configuration["data"]["models.yaml"], tmp_path, API_KEY="key", ADMIN_TOKEN="token")


@pytest.mark.parametrize("name", ["models.yaml", "models.simulated.yaml"])
def test_the_models_of_the_compose_file_are_valid(name: str, tmp_path: pathlib.Path) -> None:
    check((DEPLOY / name).read_text(), tmp_path, ADMIN_TOKEN="token")


def check(models: str, folder: pathlib.Path, **environment: str) -> None:
    """By `serve --check`, where there is a GPU and a vLLM as far as that command can see."""
    (folder / "models.yaml").write_text(models)
    for program, text in (("vllm", ""), ("nvidia-smi", "echo '0, GPU-0, H200, 143771, 0'")):
        (folder / program).write_text(f"#!/bin/sh\n{text}\n")
        (folder / program).chmod(0o755)
    process = subprocess.run(
        [sys.executable, "-m", "cumem_sleep", "serve", folder / "models.yaml", "--check"],
        env={**os.environ, **environment, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
