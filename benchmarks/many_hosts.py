"""How many GPUs do many models need for a tail of waiting times, with sleep, with restarts, and always on? On paper.

python benchmarks/many_hosts.py --out benchmarks/results/many_hosts.json --plot docs/many-hosts.png

The scheduler of `cumem-sleep serve` itself decides, on hosts of 20 models; time is simulated, and no GPU is used.
Nobody moves models between hosts: benchmarks/cluster.py routes the same requests.

Arrivals are of published shape: models' rates follow MuxServe's power law (ICML 2024) with two of its five exponents,
0.9 and 2.1, by which a fifth of 20 models gets 54 or 91 % of the requests; times between requests to a model are gamma
distributed, as BurstGPT found (arXiv 2401.17644), here with twice Poisson's deviation; answers are log-normal with
Azure's median of 129 tokens in conversations (Splitwise, ISCA 2024). A switch takes what it took on an H200
(results/serve_models.json, the 8B model).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumem_sleep.serve import actions, events
from cumem_sleep.serve.policy import STOP, Spec
from cumem_sleep.serve.scheduler import Scheduler

MODELS = 20  # of a host
TAKES_S: dict[type[Any], float] = {
    actions.Wake: 0.352,
    actions.Sleep: 0.063,
    actions.Start: 24.2,  # the stop before it is part of it
    actions.Stop: 0.0,
}
ANSWER_S, ANSWER_SIGMA = 129 * 0.02, 1.0  # the median, at 20 ms a token
CV = 2.0  # of the times between requests
TAIL = 0.01  # of requests may wait longer
LIMITS_S = (2.0, 10.0, 60.0)
HOSTS = (1, 3, 10, 30, 100)
EXPONENTS = (0.9, 2.1)
WAYS = {"sleep": (1,), "restart": (STOP,)}
WARM_UP = 0.1  # of the time


@dataclass(frozen=True)
class Late:
    """Of one host: how many requests were counted, and how many of them waited longer than each limit."""

    requests: int
    late: tuple[int, ...]


def rates(models: int, exponent: float, each: float) -> list[float]:
    """Requests a second to each model, which are `each` on average; the most popular first."""
    weights = [rank**-exponent for rank in range(1, models + 1)]
    return [weight * each * models / sum(weights) for weight in weights]


def of_hosts(all_rates: Sequence[float], hosts: int) -> list[list[float]]:
    """The rates of each host's models: dealt out to and fro, so that hosts are alike."""
    dealt: list[list[float]] = [[] for _ in range(hosts)]
    for number, rate in enumerate(all_rates):
        turn, place = divmod(number, hosts)
        dealt[place if turn % 2 == 0 else hosts - 1 - place].append(rate)
    return dealt


def on_gpus(host_rates: Sequence[float], gpus: int) -> list[int]:
    """The GPU of each model: the most popular first, each where the fewest requests go."""
    loads = [(0.0, gpu) for gpu in range(gpus)]
    found = []
    for rate in host_rates:
        load, gpu = heapq.heappop(loads)
        found.append(gpu)
        heapq.heappush(loads, (load + rate, gpu))
    return found


def arrivals(host_rates: Sequence[float], seconds: float, chance: random.Random) -> list[tuple[float, str, float]]:
    """Requests in their order: when, to which model, and how long its answer takes."""
    found = []
    shape = 1 / CV**2
    for number, rate in enumerate(host_rates):
        now = chance.expovariate(rate)
        while now < seconds:
            found.append((now, f"m{number}", chance.lognormvariate(math.log(ANSWER_S), ANSWER_SIGMA)))
            now += chance.gammavariate(shape, 1 / (rate * shape))
    return sorted(found)


def waits(
    requests: Sequence[tuple[float, str, float]], gpu_of: Sequence[int], way: str, wait_s: float = 300.0
) -> list[float]:
    """How long each request waits for its model; infinite for those that are refused.

    GPUs come one after the other: models of different ones have nothing to do with each other, and a scheduler of few
    models is fast.
    """
    waited = [math.inf] * len(requests)
    by_model: dict[str, list[int]] = {f"m{number}": [] for number in range(len(gpu_of))}
    for number, (_, model, _) in enumerate(requests):
        by_model[model].append(number)
    for gpu in set(gpu_of):
        models = [f"m{number}" for number, its in enumerate(gpu_of) if its == gpu]
        numbers = sorted(number for model in models for number in by_model[model])
        _wait({number: requests[number] for number in numbers}, models, way, wait_s, waited)
    return waited


def _wait(
    requests: dict[int, tuple[float, str, float]], models: Sequence[str], way: str, wait_s: float, waited: list[float]
) -> None:
    """Fill in how long the requests of one GPU wait."""
    at_start = "asleep" if way == "sleep" else "awake"  # of which the first is, then
    specs = [Spec(model, frozenset((0,)), levels=WAYS[way], at_start=at_start, wait_s=wait_s) for model in models]
    scheduler = Scheduler(specs, host_bytes=0)
    beginning = list(scheduler.handle(events.TimePassed(), 0.0))
    while beginning:  # servers start, and go to sleep, before time begins
        beginning += scheduler.handle(_done(beginning.pop()), 0.0)
    number = iter(range(sys.maxsize))  # of events, in whose order those of one time come
    coming: list[tuple[float, int, events.FrontEvent]] = [
        (at, next(number), events.Arrived(request, model, at + wait_s)) for request, (at, model, _) in requests.items()
    ]
    while coming:
        if (now := scheduler.next_time()) < coming[0][0]:
            event: events.FrontEvent = events.TimePassed()
        else:
            now, _, event = heapq.heappop(coming)
        for action in scheduler.handle(event, now):
            if isinstance(action, actions.Grant):
                at, _, answer_s = requests[action.request]
                waited[action.request] = now - at
                heapq.heappush(coming, (now + answer_s, next(number), events.Gone(action.request)))
            elif type(action) in TAKES_S:
                heapq.heappush(coming, (now + TAKES_S[type(action)], next(number), _done(action)))


def _done(action: Any) -> events.Done:
    return events.Done(action.model, action.operation, events.Outcome(level=getattr(action, "level", None)))


def late(host_rates: Sequence[float], seconds: float, seed: str, gpus: int, way: str) -> Late:
    """How many requests of a host wait too long with so many GPUs."""
    requests = arrivals(host_rates, seconds, random.Random(seed))
    waited = waits(requests, on_gpus(host_rates, gpus), way)
    counted = [wait for (at, _, _), wait in zip(requests, waited, strict=True) if at >= WARM_UP * seconds]
    return Late(len(counted), tuple(sum(wait > limit for wait in counted) for limit in LIMITS_S))


class HostFleet:
    """Hosts of 20 models, and what was found out about them. Several fleets of the same size are taken together."""

    def __init__(self, hosts: int, exponent: float, each: float, seconds: float, repeats: int, pool: Any) -> None:
        self._hosts = [
            (host_rates, f"{hosts} {exponent} {repeat} {number}")
            for repeat in range(repeats)
            for number, host_rates in enumerate(of_hosts(rates(MODELS * hosts, exponent, each), hosts))
        ]
        self._seconds, self._pool = seconds, pool
        self._known: dict[tuple[str, int], list[Late]] = {}

    def late(self, way: str, gpus: int) -> list[Late]:
        """Of each host with so many GPUs."""
        if (way, gpus) not in self._known:
            calls = [(host_rates, self._seconds, seed, gpus, way) for host_rates, seed in self._hosts]
            self._known[way, gpus] = self._pool.starmap(late, calls, chunksize=1)
        return self._known[way, gpus]

    def gpus_of_a_host(self, way: str, limit: int) -> float:
        """On average, as few as keep the tail; infinite if not even one for each model does."""
        fewest, most = 1, MODELS
        if self._share(self.late(way, most), limit) > TAIL:
            return math.inf
        while fewest < most:  # alike on all hosts
            middle = (fewest + most) // 2
            if self._share(self.late(way, middle), limit) > TAIL:
                fewest = middle + 1
            else:
                most = middle
        if most == 1:
            return 1.0
        # One less where that matters least.
        have, less = self.late(way, most), self.late(way, most - 1)
        costs = sorted(fewer.late[limit] - enough.late[limit] for enough, fewer in zip(have, less, strict=True))
        room = TAIL * sum(each.requests for each in have) - sum(each.late[limit] for each in have)
        spared = 0
        while spared < len(costs) and costs[spared] <= room:
            room -= costs[spared]
            spared += 1
        return most - spared / len(costs)

    @staticmethod
    def _share(found: Sequence[Late], limit: int) -> float:
        return sum(each.late[limit] for each in found) / sum(each.requests for each in found)


def run(hosts: Sequence[int], each: float, seconds: float) -> dict[str, Any]:
    """The result: for each popularity, size and way the GPUs for 20 models."""
    found = []
    with multiprocessing.Pool() as pool:
        for exponent in EXPONENTS:
            for count in hosts:
                fleet = HostFleet(count, exponent, each, seconds, max(1, 10 // count), pool)
                for way in WAYS:
                    gpus = [fleet.gpus_of_a_host(way, limit) for limit in range(len(LIMITS_S))]
                    said = [None if math.isinf(each_gpus) else round(each_gpus, 2) for each_gpus in gpus]
                    found.append({"exponent": exponent, "hosts": count, "way": way, "gpus": said})
                    print(found[-1], file=sys.stderr, flush=True)
    given = {"requests_per_minute": each * 60, "seconds": seconds, "limits_s": LIMITS_S, "models": MODELS}
    return {"given": given, "found": found}


def table(result: dict[str, Any]) -> str:
    """GPUs for 20 models, as the page has them."""
    limits, models = result["given"]["limits_s"], result["given"]["models"]
    by_case = {(each["exponent"], each["hosts"], each["way"]): each["gpus"] for each in result["found"]}
    heads = [f"{way}, {limit:g} s" for way in WAYS for limit in limits]
    lines = [f"| popularity | hosts | {' | '.join(heads)} | always on |", "|---" * (3 + len(heads)) + "|"]
    for exponent, hosts in dict.fromkeys((exponent, hosts) for exponent, hosts, _ in by_case):
        gpus = [each for way in WAYS for each in by_case[exponent, hosts, way]]
        cells = ["more" if each is None else f"{each:g}" for each in gpus]
        lines.append(f"| {exponent:g} | {hosts} | {' | '.join(cells)} | {models} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """GPUs for 20 models over the number of hosts."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    limits, models = result["given"]["limits_s"], result["given"]["models"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, exponent in zip(figure.subplots(1, len(EXPONENTS), sharey=True), EXPONENTS, strict=True):
        for way, style in zip(WAYS, ("-", "--"), strict=True):
            found = [each for each in result["found"] if (each["exponent"], each["way"]) == (exponent, way)]
            for number, limit in enumerate(limits):
                gpus = [models if each["gpus"][number] is None else each["gpus"][number] for each in found]
                label = f"{way}, 99 of 100 within {limit:g} s"
                axes.plot([each["hosts"] for each in found], gpus, style, marker="o", color=f"C{number}", label=label)
        axes.axhline(models, color="black", label="always on")
        top = sum(rates(models, exponent, 1.0)[: models // 5]) / models
        axes.set(
            xscale="log", xlabel="hosts of 20 models", title=f"a fifth of 20 models gets {top:.0%} of the requests"
        )
        axes.set_ylim(0, models + 1)
    figure.axes[0].set_ylabel("GPUs for 20 models")
    figure.axes[-1].legend(fontsize="small", loc="center right")
    figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, write the result, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS, help="how many there are")
    parser.add_argument("--requests-per-minute", type=float, default=1.0, help="to a model, on average")
    parser.add_argument("--minutes", type=float, default=30.0, help="that are simulated")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--plot", type=Path, help="draw it here")
    asked = parser.parse_args(arguments)
    result = run(asked.hosts, asked.requests_per_minute / 60, asked.minutes * 60)
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if asked.plot is not None:
        draw(result, asked.plot)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
