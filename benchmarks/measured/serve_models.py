"""Three models behind `cumem-sleep serve` (`serve_models.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .results import beside, machine
from .written import digits, spread


def table(result: dict[str, Any]) -> list[str]:
    """Three vLLM servers behind `cumem-sleep serve`: what a client waits for, by model."""
    one, overhead = result["one after the other"], result["overhead"]
    awake, switches = one["first token, awake"], one["switches"]
    titles = [" ".join((shape, *options[1:])) for shape, *options in result["models"].values()]
    command = result["machine"]["command"]
    graphs = "with CUDA graphs" if "--graphs" in command else "without CUDA graphs"
    given = [f", `{option.partition('=')[2]}`" for option in command.split() if option.startswith("--server-options=")]

    def cell(name: str, end: str, seconds: Callable[[dict[str, Any]], float]) -> str:
        return spread([seconds(switch) for switch in switches if switch[end] == name])

    def compared(how: str, what: str) -> str:
        front, direct = (1000 * overhead[how][what][way]["median_s"] for way in ("through the front", "directly"))
        return f"{what} {digits(front)} ms, and {digits(direct)} directly"

    lines = [
        f"**`cumem-sleep serve`**: {len(titles)} models with dummy weights on one GPU, level 1, vLLM"
        f" {result['machine']['vllm']} {graphs}{''.join(given)}; {one['requests']} requests to models at random, one"
        f" after the other. {machine(result)}{beside(result)}. Seconds, median and range:",
        "",
        f"|  | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for head, end, seconds in (
        ("first token after a switch to it", "new", lambda switch: switch["first_token_s"]),
        ("its wake in such a switch", "new", lambda switch: switch["own"][switch["new"]]),
        ("its sleep in a switch to another", "old", lambda switch: switch["own"][switch["old"]]),
    ):
        lines.append(f"| {head} | {' | '.join(cell(name, end, seconds) for name in result['models'])} |")
    counts = [str(sum(switch["new"] == name for switch in switches)) for name in result["models"]]
    many, restarted = result["many at once"], result["restart"]["first token of a model that is started"]
    return [
        *lines,
        f"| switches to it | {' | '.join(counts)} |",
        "",
        f"A model that was awake sent its first token after {digits(awake['median_s'])} s ({awake['count']} times). Of"
        f" {len(switches)} first tokens after a switch {one['within the target']} took no longer than that, 1.05 times"
        f" sleep and wake, and 20 ms. Then {many['clients']} clients at once, {many['requests']} requests:"
        f" {digits(many['seconds'])} s, {sum(many['errors'].values())} errors. Through the front, medians: one at a"
        f" time {compared('one at a time', 'first token')}, {compared('one at a time', 'whole answer')}; 16 at once"
        f" {compared('16 at once', 'first token')}, {compared('16 at once', 'whole answer')}. A restart of the last"
        f" model instead of a switch to it: {digits(restarted)} s to its first token."
        + "".join(f" Failed: {phase}: {why.splitlines()[0]}." for phase, why in result["failed"].items()),
    ]
