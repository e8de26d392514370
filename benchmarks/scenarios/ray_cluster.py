"""A Ray cluster of one machine, started as its operator would start it: before the server, and apart from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ending import end

STARTS_WITHIN_S = 60
ENDS_WITHIN_S = 20
# Ray's command, which no program of that name need be installed for.
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@contextmanager
def ray_cluster(gpus: int) -> Iterator[None]:
    """While it runs, `RAY_ADDRESS` and `VLLM_HOST_IP` lead this process's children to it.

    Ray is not initialized in this process: vLLM forks the engine from it, and a fork of an initialized Ray hangs.

    Raises:
        TimeoutError: it has not started in time.
    """
    import ray

    # One address for both, on a machine without a network too, where each of them would find another.
    os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    os.environ["RAY_ADDRESS"] = f"{os.environ['VLLM_HOST_IP']}:{port}"
    # By itself it would take a third of the memory for its object store.
    options = {
        "num-gpus": gpus,
        "node-ip-address": os.environ["VLLM_HOST_IP"],
        "port": port,
        "object-store-memory": 1 << 30,
        "include-dashboard": "false",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    head = subprocess.Popen([*RAY, "start", "--head", "--block", "--disable-usage-stats", *arguments])
    try:
        _wait_for(head)
        yield
    finally:
        end(head, ENDS_WITHIN_S)


def _wait_for(head: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    check = [*RAY, "health-check", f"--address={os.environ['RAY_ADDRESS']}"]
    while subprocess.run(check, check=False, capture_output=True).returncode:
        if head.poll() is not None or time.monotonic() > until:
            raise TimeoutError(f"no Ray at {os.environ['RAY_ADDRESS']} within {STARTS_WITHIN_S} s")
