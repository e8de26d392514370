"""The Python packages that this one works with. None is imported."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from ...core.torch_pools import OLDEST_TORCH
from ...errors import CumemSleepError
from ...settings import FLAG, PREFIX, Settings
from ...vllm import compatibility, plugin, seams
from ..machine import TRITON_DISTRIBUTIONS, Machine
from .report import Check, CheckStatus


def torch(machine: Machine) -> Check:
    """Whether PyTorch is there, new enough, and built for CUDA."""
    name = "PyTorch"
    found = machine.distribution("torch")
    if found is None:
        advice = "pip install torch: without it only malloc and CuPy can use this layer"
        return Check(name, CheckStatus.WARN, "not installed", advice)
    cuda = _torch_cuda(found)
    text = found.version if cuda is None else f"{found.version}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}"
    if cuda == "":
        return Check(name, CheckStatus.WARN, text, "install a build of PyTorch for CUDA (pytorch.org/get-started)")
    if _version(found.version) < OLDEST_TORCH:
        return Check(
            name,
            CheckStatus.WARN,
            text,
            f"{'.'.join(map(str, OLDEST_TORCH))} or newer is needed: pip install --upgrade torch",
        )
    return Check(name, CheckStatus.OK, text)


def _torch_cuda(torch_distribution: metadata.Distribution) -> str | None:
    """The CUDA version that PyTorch was built for; "" for a CPU build, None if it is not known."""
    try:
        text = Path(str(torch_distribution.locate_file("torch/version.py"))).read_text()
    except OSError:
        text = ""
    built_for = re.search(r"^cuda\b[^=\n]*=\s*(None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    if built_for:
        return built_for[2] or ""
    return "" if "+cpu" in torch_distribution.version else None


def compression(machine: Machine) -> Check:
    """Whether backups are to be compressed, and whether they can be."""
    name = "compression"
    variable = f"{PREFIX}COMPRESS"
    settings = Settings.from_environment(machine.environment)
    if settings.compress == "off":
        return Check(name, CheckStatus.OK, f"off ({variable}=auto makes backups of bf16 weights a third smaller)")
    if settings.driver == "sim":
        return Check(name, CheckStatus.OK, "auto; simulated, by the reference on the CPU")
    missing = [
        package
        for package, names in (("PyTorch", ("torch",)), ("Triton", TRITON_DISTRIBUTIONS))
        if machine.version_of(*names) is None
    ]
    if missing:
        found = f"auto, but {' and '.join(missing)} not installed: backups are stored uncompressed"
        return Check(name, CheckStatus.WARN, found, f"pip install torch triton, or unset {variable}")
    if (found_torch := machine.distribution("torch")) is not None and _torch_cuda(found_torch) == "":
        found = f"auto, but PyTorch {found_torch.version} is built without CUDA: backups are stored uncompressed"
        return Check(name, CheckStatus.WARN, found, f"install a build of PyTorch for CUDA, or unset {variable}")
    return Check(name, CheckStatus.OK, "auto: bf16 weights take about 0.67 of their bytes, fp8 ones 0.83")


def vllm(machine: Machine) -> Check:
    """Whether the plugin serves the installed vLLM, and is not switched off."""
    name = "vLLM"
    version = machine.version_of("vllm")
    if version is None:
        return Check(name, CheckStatus.OK, "not installed (optional)")
    own = f"{version}, which keeps its own sleep mode"
    misfit = compatibility.version_misfit(version)
    if misfit and not _is_on(machine, compatibility.UNTESTED):
        return Check(
            name,
            CheckStatus.WARN,
            f"{own}: {misfit}",
            f"install a known version, or try with {compatibility.UNTESTED}=1",
        )
    if _is_on(machine, plugin.DISABLE):
        return Check(name, CheckStatus.OK, f"{own}: {plugin.DISABLE}={machine.environment[plugin.DISABLE]}")
    if by := plugin.left_out(machine.environment):
        found = f"{own}: {by}"
        if plugin.NAME in re.sub(r"[-.\s]+", "_", by.partition("=")[2].strip().lower()):
            return Check(name, CheckStatus.WARN, found, f"vLLM compares exactly: write {plugin.NAME}, without spaces")
        return Check(name, CheckStatus.OK, found)
    if misfit:
        return Check(
            name, CheckStatus.WARN, f"{version}, with sleep mode in this layer if it fits: {misfit}", "test it"
        )
    return Check(name, CheckStatus.OK, f"{version}, with sleep mode in this layer")


def vllm_seams(machine: Machine) -> Check:
    """Whether all that this layer calls, wraps or replaces in the installed vLLM is there."""
    name, vllm = "vLLM's seams", machine.distribution("vllm")
    if vllm is None:
        return Check(name, CheckStatus.OK, "vLLM is not installed (optional)")
    _, minor, *_ = (*_version(vllm.version), 0, 0)
    states = seams.examined(Path(str(vllm.locate_file("vllm"))), minor)
    others = [f"{state}: {place}" for place, state in states.items() if state != "found"]
    found = "; ".join([f"{len(states) - len(others)} of {len(states)} found", *others])
    if not others:
        return Check(name, CheckStatus.OK, found)
    return Check(name, CheckStatus.WARN, found, "see CONTRIBUTING, A new version of vLLM")


def _is_on(machine: Machine, variable: str) -> bool:
    """Bad values count as off: the check of the settings reports them."""
    try:
        return bool(FLAG.read(variable, machine.environment.get(variable, "").strip() or "0"))
    except CumemSleepError:
        return False


def _version(text: str) -> tuple[int, ...]:
    """Major and minor; "2.11.0a0+git" is (2, 11)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
