"""Prometheus metrics of a fleet: what there is at this moment, and what was counted."""

from __future__ import annotations

from ..metrics import FRONT, Samples
from .fleet import Fleet
from .status import OUTCOMES, SWITCHES, Phase


def exposition(fleet: Fleet) -> str:
    """The metrics in the text format, version 0.0.4."""
    status, counters = fleet.status(), fleet.counters
    samples = Samples(FRONT)
    for model in status.models:
        for phase in Phase:
            samples.add("serve_model_state", int(model.phase is phase), model=model.name, state=phase.value)
        samples.add("serve_model_engine", 1, model=model.name, engine=model.engine)
        samples.add("serve_model_sleep_level", model.level or 0, model=model.name)
        samples.add("serve_requests_waiting", model.waiting, model=model.name)
        samples.add("serve_oldest_wait_seconds", model.oldest_wait_s, model=model.name)
        samples.add("serve_requests_running", model.running, model=model.name)
        samples.add("serve_model_host_bytes", model.host_bytes, model=model.name)
        samples.add("serve_model_kept_bytes", model.kept_bytes, model=model.name)
        samples.add("serve_model_files_bytes", model.files_bytes, model=model.name)
        samples.add("serve_restarts", model.restarts, model=model.name)
    for gpu in status.gpus:
        if gpu.total_bytes is not None:
            samples.add("serve_gpu_total_bytes", gpu.total_bytes, gpu=str(gpu.gpu))
        if gpu.used_bytes is not None:
            samples.add("serve_gpu_used_bytes", gpu.used_bytes, gpu=str(gpu.gpu))
        samples.add("serve_gpu_share", sum(holder.share for holder in gpu.holders), gpu=str(gpu.gpu))
    samples.add("serve_host_budget_bytes", status.host.budget_bytes)
    samples.add("serve_host_held_bytes", status.host.held_bytes)
    samples.add("serve_host_kept_bytes", status.host.kept_bytes)
    if status.host.available_bytes is not None:
        samples.add("serve_host_available_bytes", status.host.available_bytes)
    for name in (model.name for model in status.models):  # from 0 on, or Prometheus would not see the first ones
        for kind in SWITCHES:
            for result in ("ok", "failed"):
                samples.add(
                    "serve_switches", counters.switches[name, kind, result], model=name, kind=kind, result=result
                )
            samples.add("serve_switch_seconds", counters.switch_seconds.get((name, kind), 0.0), model=name, kind=kind)
        for outcome in OUTCOMES:
            samples.add("serve_requests", counters.requests[name, outcome], model=name, outcome=outcome)
    for (name, cause), seconds in counters.waited_seconds.items():
        samples.add("serve_waited_seconds", seconds, model=name, cause=cause)
    for (name, found), histogram in counters.actuation.items():
        samples.add("serve_actuation_seconds", histogram, model=name, found=found)
    for (name, found), histogram in counters.first_token.items():
        samples.add("serve_first_token_seconds", histogram, model=name, found=found)
    return samples.text()
