"""The environment variables: which are in effect, and which nothing reads."""

from __future__ import annotations

from ...core import misspelt
from ...errors import CumemSleepError
from ...settings import PREFIX, VARIABLES, GateSettings, Settings
from ...vllm import plugin
from ..machine import Machine
from .report import Check, CheckStatus


def settings(machine: Machine) -> Check:
    """Which settings are in effect, and which variables look like settings but are none."""
    name = "settings"
    given = {variable: text for variable, text in machine.environment.items() if variable.startswith(PREFIX)}
    known = {variable: text for variable, text in misspelt.hidden(given).items() if variable in VARIABLES}
    in_force = [f"{variable}={text}" for variable, text in sorted(known.items()) if text.strip()]
    found = ", ".join(in_force) or "all at their defaults"
    try:
        Settings.from_environment(given)
        GateSettings.from_environment(given)
        plugin.check_variables(given)
    except CumemSleepError as error:
        return Check(name, CheckStatus.FAIL, str(error), "correct the variable, or unset it")
    if unknown := misspelt.misspelt(given):
        advice = "; ".join(
            f"misspelt? {variable} may be {nearest}" if nearest else f"unset {variable}"
            for variable, nearest in unknown.items()
        )
        return Check(name, CheckStatus.WARN, f"{found}; nothing reads {', '.join(unknown)}", advice)
    return Check(name, CheckStatus.OK, found)
