"""The compose files and what they mount, as far as that shows without containers."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import yaml
from rendered import DEPLOY, ENDS_WITHIN_S

FILES = ("compose.yaml", "compose.gpu.yaml")


def merged(*files: str) -> dict[str, Any]:
    """The services of these files, one on top of the other."""
    options = [option for file in files for option in ("-f", str(DEPLOY / file))]
    command = ["podman-compose", *options, "--profile", "grafana", "config"]
    environment = {**os.environ, "ADMIN_TOKEN": "token", "VAULT_MEMORY": "200GiB"}
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    services: dict[str, Any] = yaml.safe_load(process.stdout)["services"]
    return services


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by the place in the container: no place twice."""
    pairs = [mount.split(":")[:2] for mount in service["volumes"]]
    found = {inside: outside for outside, inside in pairs}
    assert len(found) == len(pairs)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_compose_file_fits_the_specification(name: str) -> None:
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / name)]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_a_workflow_fits_its_schema(name: str) -> None:
    workflow = DEPLOY.parent.parent / ".github" / "workflows" / name
    subprocess.run(["check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)], check=True)


@pytest.mark.parametrize("files", [FILES[:1], FILES])
def test_all_services_are_reached_on_the_loopback_interface_only(files: tuple[str, ...]) -> None:
    services = merged(*files)
    assert {service["network_mode"] for service in services.values()} == {"host"}
    assert not any("ports" in service for service in services.values())
    metrics = services["vault"]["command"][services["vault"]["command"].index("--metrics") + 1]
    assert metrics.isdigit()
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_vault_and_front_use_gpus_if_both_files_are_given() -> None:
    alone, with_gpus = merged("compose.yaml"), merged(*FILES)
    for name in ("vault", "front"):
        assert "deploy" not in alone[name]
        (device,) = with_gpus[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] == "all"
        drivers = [found[name]["environment"]["CUMEM_SLEEP_DRIVER"] for found in (alone, with_gpus)]
        assert drivers == ["sim", "cuda"]
    models = [mounts(found["front"])[found["front"]["command"][1]] for found in (alone, with_gpus)]
    assert models == ["./models.simulated.yaml", "./models.yaml"]
    assert with_gpus["vault"]["command"][:3] == ["vault", "--memory", "200GiB"]


def test_the_vault_sees_clients_die_and_a_front_has_the_time_to_end_its_servers() -> None:
    services = merged(*FILES)
    assert services["vault"]["pid"] == "host"
    assert services["vault"]["ulimits"] == {"memlock": -1}
    assert services["front"]["init"]
    assert int(services["front"]["stop_grace_period"].removesuffix("s")) > ENDS_WITHIN_S
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


def test_secrets_come_from_the_environment() -> None:
    services = merged(*FILES)
    assert services["front"]["environment"]["ADMIN_TOKEN"] == "token"
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "token"


def test_the_image_takes_no_package_from_an_index() -> None:
    (install,) = [line for line in (DEPLOY / "image/Containerfile").read_text().splitlines() if "pip install" in line]
    assert "--no-index --find-links /dist " in install


def test_front_and_vault_share_the_socket() -> None:
    services = merged(*FILES)
    vault, front = services["vault"], services["front"]
    assert mounts(vault)["/vault"] == mounts(front)["/vault"] == "vault"
    assert front["environment"]["CUMEM_SLEEP_VAULT"] == vault["command"][vault["command"].index("--socket") + 1]


def test_folders_of_the_image_that_volumes_cover_belong_to_its_user() -> None:
    """A new volume has the owner that the folder has in the image."""
    (line,) = [line for line in (DEPLOY / "image/Containerfile").read_text().splitlines() if "install -d" in line]
    folders = line.partition("install -d -o models -m 700 ")[2].split()
    services = merged(*FILES)
    volumes = {place for name in ("vault", "front") for place in mounts(services[name]) if not place.endswith(".yaml")}
    assert volumes == {*folders}


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    grafana = merged("compose.yaml")["grafana"]
    mounted = mounts(grafana)
    source, provider = (
        yaml.safe_load((DEPLOY / "grafana" / name).read_text()) for name in ("datasource.yaml", "dashboards.yaml")
    )
    assert mounted["/etc/grafana/provisioning/datasources/cumem-sleep.yaml"] == "./grafana/datasource.yaml"
    assert mounted["/etc/grafana/provisioning/dashboards/cumem-sleep.yaml"] == "./grafana/dashboards.yaml"
    assert (source["apiVersion"], provider["apiVersion"]) == (1, 1)
    (datasource,) = source["datasources"]
    assert (datasource["type"], datasource["url"]) == ("prometheus", "http://localhost:9090")
    (folder,) = provider["providers"]
    assert mounted[folder["options"]["path"]] == "./grafana"
