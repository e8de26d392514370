"""Three models behind `cumem-sleep serve` (`serve_models.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .results import machine
from .written import digits, header, row, spread

Facts = dict[str, Any]
_EXECUTION = {
    "eager": "without CUDA graphs",
    "graphs": "with CUDA graphs, not compiled",
    "compiled": "compiled, with CUDA graphs",
}


def table(result: Facts) -> list[str]:
    """Three vLLM servers behind `cumem-sleep serve`: what a client waits for, by model."""
    one, overhead, many = result["one after the other"], result["overhead"], result["many at once"]
    titles, at_once = _titles(result), f"{many['clients']} at once"
    to, away = (
        {name: [switch for switch in one["switches"] if switch[end] == name] for name in titles}
        for end in ("new", "old")
    )
    command = result["machine"]["command"]
    graphs = _EXECUTION[result["execution"]]
    given = [f", `{option.partition('=')[2]}`" for option in command.split() if option.startswith("--server-options=")]

    def spreads(head: str, seconds_of: Callable[[str], list[float]]) -> str:
        """A cell for each model: of its seconds median and range."""
        return row(head, (spread(seconds) if seconds else "not measured" for seconds in map(seconds_of, titles)))

    def compared(how: str, what: str) -> str:
        front, direct = (1000 * overhead[how][what][way]["median_s"] for way in ("through the front", "directly"))
        return f"{what} {digits(front)} ms, and {digits(direct)} directly"

    lines = [
        f"**`cumem-sleep serve`**: {len(titles)} models with dummy weights on one GPU, level 1, vLLM"
        f" {result['machine']['vllm']} {graphs}{''.join(given)}; {one['requests']} requests to models at random, one"
        f" after the other. {machine(result)}. Seconds, median and range:",
        "",
        *header(titles.values()),
        spreads("first token after a switch to it", lambda name: [switch["first_token_s"] for switch in to[name]]),
        spreads("its wake in such a switch", lambda name: [switch["own"][name] for switch in to[name]]),
        spreads("its sleep in a switch to another", lambda name: [switch["own"][name] for switch in away[name]]),
        row("switches to it", (str(len(to[name])) for name in titles)),
    ]
    if awake := one.get("first tokens of a model that is awake"):
        lines.append(spreads("first token while it was awake", lambda name: awake.get(name, [])))
    if restarts := result.get("restarts"):
        started = {switch["new"]: [switch["first_token_s"]] for switch in restarts["switches"]}
        lines.append(spreads("first token after a restart instead", lambda name: started.get(name, [])))
    return [
        *lines,
        "",
        f"{_within(one)} Then {many['clients']} clients at once, {many['requests']} requests:"
        f" {digits(many['seconds'])} s, {sum(many['errors'].values())} errors. Through the front, medians: one at a"
        f" time {compared('one at a time', 'first token')}, {compared('one at a time', 'whole answer')}; {at_once}"
        f" {compared(at_once, 'first token')}, {compared(at_once, 'whole answer')}.{_restarted(result)}"
        + "".join(f" Failed: {phase}: {why.splitlines()[0]}." for phase, why in result["failed"].items()),
    ]


def _titles(result: Facts) -> dict[str, str]:
    return {name: " ".join((shape, *options[1:])) for name, (shape, *options) in result["models"].items()}


def _within(one: Facts) -> str:
    """How many switches took no longer than they may."""
    if "limit" in one:
        return (
            f"Of {one['compared']} first tokens after a switch {one['within the limit']} took no longer than 1.05 times"
            " sleep and wake, 20 ms, and the median first token of the same model while it was awake."
        )
    awake = one["first token, awake"]  # of all models together
    return (
        f"A model that was awake sent its first token after {digits(awake['median_s'])} s ({awake['count']} times). Of"
        f" {len(one['switches'])} first tokens after a switch {one['within the target']} took no longer than that, 1.05"
        " times sleep and wake, and 20 ms."
    )


def _restarted(result: Facts) -> str:
    """What a restart is, and which there was no time for."""
    if restarts := result.get("restarts"):
        left_out = [f" {_titles(result)[name]} was not restarted: {why}." for name, why in restarts["left out"].items()]
        return f" A restart is the stop of the model that ran and the start of this one.{''.join(left_out)}"
    if restart := result.get("restart"):  # of the last model alone
        seconds = restart["first token of a model that is started"]
        return f" A restart of the last model instead of a switch to it: {digits(seconds)} s to its first token."
    return ""
