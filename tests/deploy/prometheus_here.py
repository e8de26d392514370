"""A Prometheus on this machine, with the configuration and the rules of examples/deploy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
WITHIN_S = 200.0


def program(name: str) -> str:
    """The path of one of Prometheus's programs; without it the test is skipped, and in CI fails."""
    path = shutil.which(name)
    if path is None:
        why = f"{name} is not installed: apt-get install prometheus"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    return path


class Prometheus:
    """One that runs."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self._url = url
        self._process = process

    def ask(self, path: str, **query: str) -> Any:
        """What its API answers under /api/v1; asked again until it listens."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        while True:
            try:
                with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                if error.code != 503:  # it begins
                    raise AssertionError(f"{query}: {error.read().decode()}") from None
            except urllib.error.URLError:
                pass
            assert self._process.poll() is None, "Prometheus has ended"
            time.sleep(0.05)

    def result(self, query: str) -> list[Any]:
        """A query's series, as soon as there are any; empty if there are none in time."""
        ends_at = time.monotonic() + WITHIN_S
        while not (found := self.ask("query", query=query)["result"]) and time.monotonic() < ends_at:
            time.sleep(0.1)
        return list(found)


@contextlib.contextmanager
def scraping(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """With the targets of its jobs in place of those in the file, and in a hurry."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder, "web.listen-address": address}
    with (folder / "log").open("wb") as log:
        command = [program("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{address}", process)
    finally:
        process.terminate()
        process.wait()
