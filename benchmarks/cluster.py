"""What does one endpoint over several nodes cost, and does its router keep what many_hosts.py promises?

python benchmarks/cluster.py trace    # simulated time, no Ray: results/cluster_trace.json
python benchmarks/cluster.py live     # real Ray on this machine, simulated models: results/cluster_live.json

`trace` sends the requests of many_hosts.py, three hosts of 20 models, through the real router over real schedulers (the
world of tests/serve/test_routing.py), beside many_hosts.py itself, where each model stays on its host. `live` asks a
model that is awake, at its node's front and at the ingress, one request at a time and many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import many_hosts

ROOT = Path(__file__).parent.parent
HOSTS, SECONDS, EACH = 3, 900.0, 1 / 60
WARM_S = 1600.0  # in which all have been started, one after the other on a GPU, and sleep


def shares(waited: list[float]) -> dict[str, float]:
    """How many of 100 requests waited longer than each limit."""
    return {f"over {s:g} s": round(100 * sum(w > s for w in waited) / len(waited), 2) for s in many_hosts.LIMITS_S}


def trace(exponent: float, gpus: int, seed: str) -> dict[str, Any]:
    """The same requests with fixed places, and through the router with each model asleep on one node, and on all."""
    sys.path.insert(0, str(ROOT / "tests" / "serve"))
    import test_routing as routing

    from cumem_sleep.serve.policy import Spec
    from cumem_sleep.serve.status import Phase

    routing.TAKES_S.update({kind: many_hosts.TAKES_S[kind] for kind in routing.TAKES_S})
    rates = many_hosts.rates(many_hosts.MODELS * HOSTS, exponent, EACH)
    dealt = many_hosts.of_hosts(list(enumerate(rates)), HOSTS)  # type: ignore[arg-type]
    fixed: list[float] = []
    requests, gpu_of, home = [], {}, {}
    for host, models in enumerate(dealt):
        found = many_hosts.arrivals([rate for _, rate in models], SECONDS, random.Random(f"{seed} {host}"))  # type: ignore[misc]
        places = many_hosts.on_gpus([rate for _, rate in models], gpus)  # type: ignore[misc]
        names = [f"m{number}" for number, _ in models]  # type: ignore[misc]
        fixed += many_hosts.waits(found, places, "sleep")
        requests += [(at, names[int(model[1:])], answer_s) for at, model, answer_s in found]
        gpu_of |= dict(zip(names, places, strict=True))
        home |= dict.fromkeys(names, f"n{host}")
    said = {"requests": len(requests), "each on its host": shares(fixed)}
    for copies in (1, HOSTS):
        specs = [Spec(name, frozenset((gpu,)), levels=(1,)) for name, gpu in gpu_of.items()]
        world = routing.World(specs, HOSTS, ingresses=1, seed=seed, busy=256)
        for node in world.nodes.values():
            world.placed[node.name] = {name for name in home if copies > 1 or home[name] == node.name}
            world.boot(node)
        world.run(WARM_S)
        models = [model for node in world.nodes.values() for model in node.scheduler.models.values()]
        assert not any(model.phase is Phase.STARTING for model in models), "a request would wait for a first start"
        for at, model, answer_s in sorted(requests):
            world.run(WARM_S + at)
            world.ask(model, answer_s=answer_s)
        world.run(WARM_S + SECONDS + 600)
        waited = [(r.granted_at or 1e9) - r.at for r in world.requests.values()]
        said[f"routed, asleep on {copies}"] = shares(waited)
        said[f"wakes, asleep on {copies}"] = sum(world.wakes.values())
    return said


async def ask(client: Any, url: str, token: str, clients: int, seconds: float) -> dict[str, float]:
    """Whole answers of five words, by so many clients at once."""
    took: list[float] = []
    headers, body = {"Authorization": f"Bearer {token}"}, {"model": "m0", "messages": [], "max_tokens": 5}
    ends_at = time.perf_counter() + seconds

    async def one() -> None:
        while (begun := time.perf_counter()) < ends_at:
            answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            took.append(time.perf_counter() - begun)

    await asyncio.gather(*(one() for _ in range(clients)))
    cuts = statistics.quantiles(took, n=100)
    return {"a_second": len(took) / seconds, "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


def live(nodes: int, seconds: float) -> dict[str, Any]:
    """A cluster of so many nodes, asked through the ingress, and the first node's front by itself."""
    sys.path.insert(0, str(ROOT / "tests" / "ray"))
    folder = Path(tempfile.mkdtemp(prefix="cumem-sleep-cluster-"))
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_enable_worker_prestart="0", XDG_STATE_HOME=str(folder))
    import httpx
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from test_ray import PORT, ray_node

    from cumem_sleep.serve.ray import app

    names = [f"127.0.0.{2 + number}" for number in range(nodes)]
    command = f"{sys.executable} -m cumem_sleep.serve.simulated_server --uds {{socket}} --served-model-name"
    model = {"engine": "vllm", "host_memory": "1GiB", "idle": "never", "at_start": "awake"}
    models = {f"m{number}": {**model, "command": f"{command} m{number}"} for number in range(nodes)}
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": models, "hosts": names, "host_memory": "100GiB", "busy": 1}))
    cluster = Cluster(True, head_node_args={**ray_node(names[0]), "include_dashboard": False, "no_monitor": True})
    try:
        for name in names[1:]:
            cluster.add_node(**ray_node(name))
        ray.init(address=cluster.address, _node_ip_address=names[0], log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(app({"models": str(path)}))
        where = serve.get_deployment_handle(f"front-{names[0]}", "default").where.remote().result()
        token = where.headers[0][1].removeprefix("Bearer ")

        async def measure() -> dict[str, Any]:
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
                found = {}
                for name, url in (("front", where.base_url), ("ingress", f"http://127.0.0.1:{PORT}")):
                    await ask(client, url, token, 1, 10.0)  # until the model is awake
                    found[name] = {str(many): await ask(client, url, token, many, seconds) for many in (1, 16)}
                return found

        found = asyncio.run(measure())
        serve.shutdown()
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("trace", "live"))
    parser.add_argument("--nodes", type=int, nargs="+", default=(1, 3))
    parser.add_argument("--seconds", type=float, default=10.0, help="of `live`, for each figure")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.part == "trace":
        cases = [(exponent, gpus) for exponent in many_hosts.EXPONENTS for gpus in (3,)]
        found: dict[str, Any] = {
            f"popularity {exponent}, {gpus} GPUs a host": trace(exponent, gpus, "1") for exponent, gpus in cases
        }
    else:
        found = {f"{nodes} nodes": live(nodes, asked.seconds) for nodes in asked.nodes}
    text = json.dumps({"part": asked.part, "load_of_the_machine": os.getloadavg(), "found": found}, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
