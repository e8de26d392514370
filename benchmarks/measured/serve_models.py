"""Models behind `cumem-sleep serve` (`serve_models.py`)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from .results import machine
from .written import digits, header, row, spread

Facts = dict[str, Any]


def table(result: Facts) -> list[str]:
    """Three vLLM servers behind `cumem-sleep serve`: what a client waits for, by model."""
    one, many = result["one after the other"], result["many at once"]
    titles = {name: " ".join((shape, *options[1:])) for name, (shape, *options) in result["models"].items()}
    to, away = (
        {name: [switch for switch in one["switches"] if switch[end] == name] for name in titles}
        for end in ("new", "old")
    )
    command = result["machine"]["command"]
    given = [f", `{option.partition('=')[2]}`" for option in command.split() if option.startswith("--server-options=")]

    def spreads(head: str, seconds_of: Callable[[str], list[float]]) -> str:
        """A cell for each model: of its seconds median and range."""
        return row(head, (spread(seconds) if seconds else "not measured" for seconds in map(seconds_of, titles)))

    restarts, awake = result["restarts"], one["first tokens of a model that is awake"]
    started = {switch["new"]: [switch["first_token_s"]] for switch in restarts["switches"]}
    left_out = (f" {titles[name]} was not restarted: {why}." for name, why in restarts["left out"].items())
    return [
        f"**`cumem-sleep serve`**: {len(titles)} models with dummy weights on one GPU, level 1, vLLM"
        f" {result['machine']['vllm']} with CUDA graphs, not compiled{''.join(given)}; {one['requests']} requests to"
        f" models at random, one after the other. {machine(result)}. Seconds, median and range:",
        "",
        *header(titles.values()),
        spreads("first token after a switch to it", lambda name: [switch["first_token_s"] for switch in to[name]]),
        spreads("its wake in such a switch", lambda name: [switch["own"][name] for switch in to[name]]),
        spreads("its sleep in a switch to another", lambda name: [switch["own"][name] for switch in away[name]]),
        spreads("first token while it was awake", lambda name: awake.get(name, [])),
        spreads("first token after a restart instead", lambda name: started.get(name, [])),
        "",
        f"{one['within the limit']} of {one['compared']} first tokens after a switch took at most 1.05 times sleep and"
        f" wake, a first token of that model awake, and 20 ms. Then {many['clients']} clients at once,"
        f" {many['requests']} requests: {digits(many['seconds'])} s,"
        f" {sum(many['errors'].values())} errors.{''.join(left_out)}"
        + "".join(f" Failed: {phase}: {why.splitlines()[0]}." for phase, why in result["failed"].items()),
    ]


def headline(result: Facts) -> list[str]:
    """Of the README: the first token of each model, by what had to be done for it."""
    one, restarts = result["one after the other"], result["restarts"]["switches"]
    titles = {name: " ".join((f"Qwen3-{shape}", *options[1:])) for name, (shape, *options) in result["models"].items()}
    after = {name: [each["first_token_s"] for each in one["switches"] if each["new"] == name] for name in titles}
    started = {each["new"]: each["first_token_s"] for each in restarts}
    awake = one["first tokens of a model that is awake"]
    return [
        f"Models that share one {result['machine']['gpu']} behind `cumem-sleep serve`: seconds to the first token"
        " ([medians](docs/benchmarks.md)).",
        "",
        *header(titles.values()),
        row("its server is started again", (digits(started[name]) for name in titles)),
        row("**it wakes, the other one sleeps**", (f"**{digits(median(after[name]))}**" for name in titles)),
        row("it was awake", (digits(median(awake[name])) for name in titles)),
    ]
