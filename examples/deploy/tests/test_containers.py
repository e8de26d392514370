"""The image, the compose file and the pods, run by podman on the simulated driver.

.ci/run makes the images, and a network namespace in which the documented ports are free.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendered import DEPLOY, memory_bytes, of_kind, pods

IMAGE = "localhost/cumem-sleep"
ANOTHER_ADDRESS = "192.0.2.1"  # of this namespace: not loopback, as what a kubelet asks
ASKED = {"messages": [{"role": "user", "content": "Who are you?"}]}


def podman(*arguments: object) -> str:
    """What it prints."""
    command = ["podman", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout


def fetch(url: str, body: object = None, key: str = "") -> str:
    """The answer, as soon as anybody listens there."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"} if key else {})
    for _ in range(1500):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:  # not yet
            time.sleep(0.2)
    raise TimeoutError(url)


def ask(model: str, key: str = "") -> str:
    """What a model says."""
    answer = json.loads(fetch("http://127.0.0.1:8000/v1/chat/completions", {"model": model, **ASKED}, key))
    return str(answer["choices"][0]["message"]["content"])


def copied_by_the_vault() -> float:
    """Bytes, ever."""
    metrics = fetch("http://127.0.0.1:9400/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in metrics if line.startswith("cumem_sleep_vault_gpu_copied_"))


def test_the_image_runs_the_demo_as_a_user_without_rights() -> None:
    said = podman("run", "--rm", "--network=none", "-e", "CUMEM_SLEEP_DRIVER=sim", IMAGE, "demo", "--json")
    assert json.loads(said)["ok"]
    assert podman("run", "--rm", "--network=none", "--entrypoint=id", IMAGE, "-u").strip() == "2000"


def test_the_wheel_was_installed_where_there_is_no_compiler_and_names_its_commit() -> None:
    # One by one: of several names this shell looks at the first alone.
    look = "for name in cc gcc g++ c++ clang cpp ld; do command -v $name; done; cumem-sleep --version"
    root = DEPLOY.parents[1]
    commit = (root / "cumem_sleep" / "commit.txt").read_text().strip()
    (wheel,) = (root / "dist").glob("cumem_sleep-*.whl")
    said = podman("run", "--rm", "--network=none", "--entrypoint=sh", IMAGE, "-c", look)
    assert said.startswith(f"cumem-sleep {wheel.name.split('-')[1]} (commit {commit}; GCC ")


@pytest.fixture(scope="class")
def services() -> Iterator[str]:
    """What the README's commands say: all services but Grafana, whose image is nowhere to be had."""
    readme = (DEPLOY / "README.md").read_text()
    (commands,) = re.findall(r"```bash\n(export ADMIN_TOKEN=.+?)```", readme, re.DOTALL)
    (down,) = re.findall(r"`(podman-compose .+ down -v)`", readme)

    def run(shell: str) -> str:
        environment = {**os.environ, "ADMIN_TOKEN": "token", "PROMETHEUS_IMAGE": "localhost/prometheus"}
        options: Any = {"cwd": DEPLOY.parent.parent, "env": environment, "stdin": subprocess.DEVNULL}
        return subprocess.run(["bash", "-ec", shell], check=True, stdout=subprocess.PIPE, text=True, **options).stdout

    try:
        yield run(commands)
    finally:
        run(down)


@pytest.mark.usefixtures("services")
class TestCompose:
    def test_the_commands_of_the_readme_show_what_they_should(self, services: str) -> None:
        takes = f"\ncumem_sleep_vault_memory_bytes {256 << 20}\n"
        for shown in ("This is large", '"state": "awake"', "Every byte of the weights equalled its source", takes):
            assert shown in services

    def test_a_container_reaches_the_vault_of_another(self) -> None:
        assert copied_by_the_vault() > 0  # by the README's demo, in the front's container

    def test_each_model_answers(self) -> None:
        for model in ("small", "large", "small"):
            assert f"This is {model}" in ask(model)

    def test_prometheus_scrapes_both(self) -> None:
        for _ in range(300):
            targets = json.loads(fetch("http://127.0.0.1:9090/api/v1/targets"))["data"]["activeTargets"]
            if targets and all(target["health"] == "up" for target in targets):
                break
            time.sleep(0.2)
        assert {target["scrapeUrl"]: target["health"] for target in targets} == {
            "http://localhost:8000/metrics": "up",
            "http://localhost:8000/models/metrics": "up",
            "http://localhost:9400/metrics": "up",
        }


@pytest.fixture(scope="class")
def cluster_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The pods of the overlay without GPUs, as podman knows them, with what the cluster would do for them."""
    folder = tmp_path_factory.mktemp("pods")
    (folder / "socket").mkdir()
    keys = {name: base64.b64encode(name.encode()).decode() for name in ("api-key", "admin-token")}
    (folder / "secret.json").write_text(json.dumps(keys))
    played = [*of_kind("simulated", "ConfigMap").values()]
    for name in ("vault", "front"):
        pod = as_podman_knows(name, folder / "socket")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all([*played, pod]))
    podman("secret", "create", "keys", folder / "secret.json")
    try:
        prepare_socket_folder(folder / "socket")
        for name in ("vault", "front"):
            podman("kube", "play", folder / f"{name}.yaml")
        yield
        print(*(podman("logs", f"{name}-{name}") for name in ("vault", "front")))
    finally:
        podman("pod", "rm", "--force", "--all", "--time=3")
        podman("secret", "rm", "keys")


@pytest.mark.usefixtures("cluster_pods")
class TestPods:
    def test_probes_are_answered_at_the_address_of_the_pod(self) -> None:
        for pod in pods("simulated").values():
            (container,) = pod["spec"]["containers"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            probe = container["readinessProbe"]["httpGet"]
            fetch(f"http://{ANOTHER_ADDRESS}:{ports[probe['port']]}{probe['path']}")

    def test_a_model_answers_those_who_have_the_key(self) -> None:
        fetch("http://127.0.0.1:8000/health")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("large")
        assert "This is large" in ask("large", "api-key")

    def test_the_vault_takes_what_it_requests_and_copies(self) -> None:
        (vault,) = pods("simulated")["vault"]["spec"]["containers"]
        takes = f"cumem_sleep_vault_memory_bytes {memory_bytes(vault['resources']['requests']['memory'])}"
        assert takes in fetch("http://127.0.0.1:9400/metrics").splitlines()
        fetch("http://127.0.0.1:8000/health")
        assert json.loads(podman("exec", "front-front", "cumem-sleep", "demo", "--json"))["ok"]
        assert copied_by_the_vault() > 0


def as_podman_knows(name: str, socket_folder: pathlib.Path) -> dict[str, Any]:
    """A pod of its own on the host's network, with the variable that the kubelet puts in."""
    template = json.loads(json.dumps(pods("simulated")[name]))
    spec = template["spec"]
    spec["hostNetwork"] = True
    for volume in spec["volumes"]:
        if "hostPath" in volume:
            volume["hostPath"]["path"] = str(socket_folder)
    (container,) = spec["containers"]
    requested = str(memory_bytes(container["resources"]["requests"]["memory"]))
    container["args"] = [argument.replace("$(MEMORY)", requested) for argument in container["args"]]
    for known in ("ports", "readinessProbe", "livenessProbe"):  # the tests ask themselves
        container.pop(known, None)
    spec.pop("initContainers", None)  # which podman 4.3 waits for 20 s
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def prepare_socket_folder(folder: pathlib.Path) -> None:
    """What the vault's initial container does, with no more rights than it has there."""
    (initial,) = pods("simulated")["vault"]["spec"]["initContainers"]
    rights = initial["securityContext"]["capabilities"]
    dropped, added = ([f"--cap-{verb}={right}" for right in rights[verb]] for verb in ("drop", "add"))
    (mount,) = initial["volumeMounts"]
    options = ["--rm", f"--user={initial['securityContext']['runAsUser']}", *dropped, *added]
    program, *arguments = initial["command"]
    podman("run", *options, f"--volume={folder}:{mount['mountPath']}", f"--entrypoint={program}", IMAGE, *arguments)
