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
import yaml
from rendered import DEPLOY, ENDS_WITHIN_S, OVERLAYS, memory_bytes, of_kind, pods, resources

import cumem_sleep

README = (DEPLOY / "README.md").read_text()
OLDEST, NEWEST = "1.29", "1.37"
overlays = pytest.mark.parametrize("overlay", OVERLAYS)
WITH_VAULT = [overlay for overlay in OVERLAYS if overlay != "gpu-without-vault"]
with_vault = pytest.mark.parametrize("overlay", WITH_VAULT)


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
def test_quantities_are_what_kubernetes_takes(overlay: str) -> None:
    """Which no schema says: 16GB is refused only by a cluster."""
    for pod in pods(overlay).values():
        amounts = [each for container in pod["spec"]["containers"] for each in container["resources"].values()]
        quantities = [str(quantity) for each in amounts for quantity in each.values()]
        quantities += [each["emptyDir"]["sizeLimit"] for each in pod["spec"]["volumes"] if each.get("emptyDir")]
        assert [each for each in quantities if not re.fullmatch(r"\d+(m|[KMGT]i?)?", each)] == []


@overlays
def test_an_overlay_has_what_the_cluster_needs(overlay: str) -> None:
    kinds = sorted((resource["kind"], resource["metadata"]["name"].split("-")[0]) for resource in resources(overlay))
    wanted = [("ConfigMap", "models"), ("Deployment", "front"), ("Namespace", "cumem"), ("NetworkPolicy", "front")]
    wanted += [("PodDisruptionBudget", "front"), ("Service", "front")]
    if overlay in WITH_VAULT:
        wanted += [("DaemonSet", "vault"), ("NetworkPolicy", "vault")]
    if overlay != "simulated":
        wanted += [("PersistentVolumeClaim", "weights")]
    assert kinds == sorted(wanted)
    namespaces = {found["metadata"].get("namespace") for found in resources(overlay) if found["kind"] != "Namespace"}
    assert namespaces == {*of_kind(overlay, "Namespace")}


@overlays
def test_selectors_find_the_pods_of_that_name_and_no_others(overlay: str) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay).items()}
    selecting = [
        resource
        for resource in resources(overlay)
        if "selector" in resource.get("spec", {}) or "podSelector" in resource.get("spec", {})
    ]
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
        assert container["readinessProbe"]["httpGet"]["path"] == {"vault": "/metrics", "front": "/health"}[name]
        policy = of_kind(overlay, "NetworkPolicy")[name]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == {*ports}
        assert all(rule["from"] for rule in policy["ingress"])
        configured = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        assert configured <= {*of_kind(overlay, "ConfigMap")}
    (front,) = pods(overlay)["front"]["spec"]["containers"]
    (configuration,) = of_kind(overlay, "ConfigMap").values()
    folder = named(front["volumeMounts"])["models"]["mountPath"]
    assert front["args"] == ["serve", *(f"{folder}/{name}" for name in configuration["data"])]
    if overlay in WITH_VAULT:
        (vault,) = pods(overlay)["vault"]["spec"]["containers"]
        (port,) = vault["ports"]
        assert vault["args"][vault["args"].index("--metrics") + 1] == f"0.0.0.0:{port['containerPort']}"
    (port,) = of_kind(overlay, "Service")["front"]["spec"]["ports"]
    assert port["targetPort"] in named(pods(overlay)["front"]["spec"]["containers"][0]["ports"])


@with_vault
def test_the_vault_takes_the_memory_that_it_requests(overlay: str) -> None:
    (vault,) = pods(overlay)["vault"]["spec"]["containers"]
    assert vault["args"][:3] == ["vault", "--memory", "$(MEMORY)"]
    source = named(vault["env"])["MEMORY"]["valueFrom"]["resourceFieldRef"]
    assert source == {"resource": "requests.memory"}  # of this container, in bytes
    amounts = vault["resources"]
    assert memory_bytes(amounts["requests"]["memory"]) < memory_bytes(amounts["limits"]["memory"])


@with_vault
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
    assert owner["-m"] == "0700"
    made_by = {name: named(spec["volumes"])["vault"]["hostPath"]["type"] for name, spec in specs.items()}
    assert made_by == {"vault": "DirectoryOrCreate", "front": "Directory"}


@overlays
def test_containers_have_the_rights_that_they_need_and_no_others(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert not spec["automountServiceAccountToken"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec.get("hostPID", False) == (name == "vault")
        initial = spec.get("initContainers", [])
        for rights in [each["securityContext"] for each in (*spec["containers"], *initial)]:
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"]["drop"] == ["ALL"]
        assert not any("add" in each["securityContext"]["capabilities"] for each in spec["containers"])


@overlays
def test_policies_let_through_what_the_readme_says(overlay: str) -> None:
    policies = {name: found["spec"] for name, found in of_kind(overlay, "NetworkPolicy").items()}
    front = policies.pop("front")
    going_out = {(port["protocol"], port["port"]) for rule in front["egress"] for port in rule["ports"]}
    assert going_out == {("UDP", 53), ("TCP", 53), ("TCP", 443)}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    label, value = re.findall(r"label `(\S+)=(\S+)`", README)[0]
    clients = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {label: value}}}]
    for vault in policies.values():
        assert not vault.get("egress")
        assert [rule["from"] for rule in vault["ingress"]] == [[monitoring]]
    assert [rule["from"] for rule in front["ingress"]] == [[*clients, monitoring]]


@overlays
def test_a_front_ends_before_the_next_begins_and_a_drain_waits_for_it(overlay: str) -> None:
    front = of_kind(overlay, "Deployment")["front"]["spec"]
    (budget,) = of_kind(overlay, "PodDisruptionBudget").values()
    assert front["replicas"] == budget["spec"]["minAvailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert front["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert front["template"]["spec"]["terminationGracePeriodSeconds"] > ENDS_WITHIN_S


def test_one_overlay_uses_gpus_and_the_other_none() -> None:
    for name in ("vault", "front"):
        simulated, gpu = (pods(overlay)[name]["spec"] for overlay in ("simulated", "gpu"))
        assert named(simulated["containers"][0]["env"])["CUMEM_SLEEP_DRIVER"]["value"] == "sim"
        assert not {"runtimeClassName", "nodeSelector"} & simulated.keys()
        assert (gpu["runtimeClassName"], gpu["nodeSelector"]) == ("nvidia", {"nvidia.com/gpu.present": "true"})
        assert [each["key"] for each in gpu["tolerations"]] == ["nvidia.com/gpu"]
        assert gpu["containers"][0]["image"].endswith(f"/cumem-sleep:{cumem_sleep.__version__}")
    (vault,), (front,) = (pods("gpu")[name]["spec"]["containers"] for name in ("vault", "front"))
    assert front["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert "nvidia.com/gpu" not in vault["resources"]["limits"]
    assert named(vault["env"])["NVIDIA_VISIBLE_DEVICES"]["value"] == "all"


def test_what_servers_download_outlives_a_pod_with_gpus() -> None:
    for overlay in ("gpu", "gpu-without-vault"):
        front, claim = pods(overlay)["front"]["spec"], of_kind(overlay, "PersistentVolumeClaim")["weights"]
        volumes = named(front["volumes"])
        assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}}
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
        assert front["securityContext"]["fsGroup"] == front["securityContext"]["runAsUser"]
        assert {"models", "cache", "shm"} <= {*volumes}


def test_without_a_vault_the_front_has_the_memory_for_backups() -> None:
    spec = pods("gpu-without-vault")["front"]["spec"]
    (front,) = spec["containers"]
    assert "CUMEM_SLEEP_VAULT" not in named(front["env"])
    assert "vault" not in named(spec["volumes"])
    assert front["resources"]["requests"]["memory"] == front["resources"]["limits"]["memory"] == "216Gi"
    assert front["resources"]["limits"]["nvidia.com/gpu"] == 1


@overlays
def test_a_changed_configuration_makes_no_new_pod(overlay: str) -> None:
    """Its name stays, so the kubelet changes the file, which the front reads again."""
    assert [*of_kind(overlay, "ConfigMap")] == ["models"]
    (front,) = pods(overlay)["front"]["spec"]["containers"]
    assert "subPath" not in named(front["volumeMounts"])["models"], "which no change would reach"


@overlays
def test_secrets_are_named_and_nowhere_written_down(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    (front,) = pods(overlay)["front"]["spec"]["containers"]
    references = [env["valueFrom"]["secretKeyRef"] for env in front["env"] if re.search("KEY|TOKEN", env["name"])]
    for reference in references:
        assert f"create secret generic {reference['name']} " in README
        assert f"--from-literal={reference['key']}=" in README or reference.get("optional")
    assert {"api-key", "admin-token"} <= {reference["key"] for reference in references}


@overlays
def test_the_models_are_valid_and_open_to_others_only_with_a_key(overlay: str, tmp_path: pathlib.Path) -> None:
    (configuration,) = of_kind(overlay, "ConfigMap").values()
    models = configuration["data"]["models.yaml"]
    assert yaml.safe_load(models)["front"]["host"] == "0.0.0.0", "a kubelet asks from elsewhere"
    check(models, tmp_path, API_KEY="key", ADMIN_TOKEN="token")


@pytest.mark.parametrize("name", ["models.yaml", "models.simulated.yaml"])
def test_the_models_of_the_compose_file_are_valid(name: str, tmp_path: pathlib.Path) -> None:
    check((DEPLOY / name).read_text(), tmp_path, ADMIN_TOKEN="token")


def check(models: str, folder: pathlib.Path, **environment: str) -> None:
    """By `serve --check`, where there is a GPU and a vLLM as far as that command can see."""
    front = yaml.safe_load(models)["front"]
    assert all(secret.keys() == {"env"} for secret in (front["admin_token"], *front.get("api_keys", ())))
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


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_cluster_of_ray_is_closed_but_for_the_port_that_has_keys(version: str) -> None:
    """Of the RayService itself, which is KubeRay's, only what Kubernetes makes of it has a schema here."""
    service, policy = yaml.safe_load_all((DEPLOY / "kubernetes" / "ray" / "cluster.yaml").read_text())
    of_ray = service["spec"]["rayClusterConfig"]
    templates = [of_ray["headGroupSpec"]["template"], *(each["template"] for each in of_ray["workerGroupSpecs"])]
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": "ray", **template["metadata"]}
        kubernetes_validate.validate(pod, version, strict=True)
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    kubernetes_validate.validate(policy, version, strict=True)
    own, clients = policy["spec"]["ingress"]
    assert "ports" not in own
    assert own["from"][0]["podSelector"] == policy["spec"]["podSelector"]
    assert clients == {"ports": [{"port": 8000}]}
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert serve["http_options"]["port"] == 8000
    (application,) = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (pathlib.Path(cumem_sleep.__file__).parent.parent / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {name}(arguments: dict[str, str])" in source
    assert application["args"].keys() <= {"models", "ingresses"}
    mounts = {each["mountPath"] for each in templates[0]["spec"]["containers"][0]["volumeMounts"]}
    assert application["args"]["models"].rpartition("/")[0] in mounts
