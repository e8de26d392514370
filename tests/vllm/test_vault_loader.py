"""`--load-format cumem_sleep`: a small Llama of vLLM's, whose weights another process loaded and offered to a vault.

What is compared with what vLLM's own loader leaves are all parameters and buffers, after the weights were processed.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from environment import simulate_cuda, skip_unless_vllm, skip_vllm_before
from forking import PATH

sys.path.append(str(pathlib.Path(__file__).parents[1] / "vault"))

from running import MIB, SECONDS, RunningVault, eventually, flip_a_bit

skip_unless_vllm()
skip_vllm_before((0, 26))
pytestmark = [pytest.mark.sim, pytest.mark.slow]

OFFERED, ADOPTED, LOADED = "offered", "adopted", ""  # loaded and offered; not loaded; loaded, and nothing is said
Answer = dict[str, Any]


def how(answer: Answer | None, state: str = "") -> str:
    """What the layer's log says, which has to fit what was built and loaded. (`state`: that it has to be in.)"""
    assert answer is not None
    assert state in ("", answer["state"])
    lines = [line.removeprefix("cumem-sleep: ") for line in answer["log"] if "memory pools come" not in line]
    (said,) = lines or [LOADED]
    assert (answer["builds"], answer["layers"], answer["alive"]) == (2 if "built anew" in said else 1, 2, 0)
    if said.startswith((OFFERED, ADOPTED)):
        said = said.partition(" ")[0]
    assert answer["loads"] == (0 if said == ADOPTED else 1)
    return said


class Workers:
    """A script that forks workers, and the vault that they use."""

    def __init__(self, folder: pathlib.Path, process: subprocess.Popen[str], model: pathlib.Path) -> None:
        self.folder, self.process, self.model = folder, process, model
        self.vault: RunningVault
        self._states: dict[int, list[str]] = {}

    def load(self, **order: Any) -> list[Answer | None]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        whole = {
            "model": str(self.model),
            "vault": str(self.vault.socket),
            "meeting": str(self.folder / "meet"),
            **order,
        }
        self.process.stdin.write(json.dumps(whole) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("["):
                eventually(lambda: not self.clients(), "they have gone")
                return list(json.loads(line))
        raise AssertionError("the script has ended: see what it wrote to stderr")

    def clients(self) -> list[Any]:
        alive = self.vault.process.poll() is None
        return [each for each in self.vault.status()["clients"] if each["name"] != "looks"] if alive else []

    def states(self, ranks: int = 1) -> list[str]:
        """Which vLLM's own loader leaves."""
        if ranks not in self._states:
            self._states[ranks] = [each["state"] for each in self.load(format="auto", ranks=ranks) if each]
        return self._states[ranks]

    def kept(self) -> list[str]:
        return sorted(each["name"] for each in self.vault.status()["kept"])

    def forget(self, name: str) -> None:
        command = [sys.executable, "-m", "cumem_sleep", "vault", "forget", name, "--socket", str(self.vault.socket)]
        subprocess.run(command, check=True, timeout=SECONDS)


def make_model(folder: pathlib.Path) -> pathlib.Path:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    hidden, inner, heads, key_values, words, layers = 64, 128, 4, 2, 128, 2
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        vocab_size=words,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
    )
    config.save_pretrained(folder)
    rows = {"q": hidden, "k": hidden * key_values // heads, "v": hidden * key_values // heads, "o": hidden}
    shapes = {"model.embed_tokens": (words, hidden), "model.norm": (hidden,), "lm_head": (words, hidden)}
    for layer in (f"model.layers.{number}" for number in range(layers)):
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (each, hidden) for name, each in rows.items()}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("w")
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", PATH)
        context.setenv("CUDA_VISIBLE_DEVICES", "")
        context.setattr(sys, "path", list(sys.path))
        simulate_cuda(folder)
        context.setenv("CUMEM_SLEEP_DRIVER", "sim")
        context.setenv("XDG_CACHE_HOME", str(folder))
        (folder / "model").mkdir()
        model = make_model(folder / "model")
        process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("loading_workers.py")), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
    yield Workers(folder, process, model)
    process.kill()
    process.communicate(timeout=SECONDS)


@pytest.fixture
def start_vault(script: Workers, tmp_path: pathlib.Path) -> Iterator[Callable[..., RunningVault]]:
    """Starts vaults, the last of which the workers use."""
    folder = tmp_path / "v"
    folder.mkdir(mode=0o700)
    started: list[RunningVault] = []

    def start(*options: str) -> RunningVault:
        started.append(RunningVault(folder, "64MiB", "--slab-size", "16MiB", *options))
        started[-1].wait_until_ready()
        script.vault = started[-1]
        return script.vault

    yield start
    for running in started:
        running.close()


@pytest.fixture
def workers(script: Workers, start_vault: Callable[..., RunningVault]) -> Workers:
    start_vault("--keep-weights", "32MiB")
    return script


@pytest.fixture
def own(script: Workers, workers: Workers) -> str:
    """The state that vLLM's own loader leaves."""
    (state,) = script.states()
    return state


def test_a_worker_adopts_what_another_has_loaded(workers: Workers, own: str) -> None:
    """At other addresses, in another order. Only what comes from files was processed before it is kept, or offered."""
    for elsewhere, expected in ((False, OFFERED), (True, ADOPTED), (False, ADOPTED)):
        assert how(*workers.load(elsewhere=elsewhere), own) == expected
    (name,) = workers.kept()
    assert name.startswith("model, rank 0 of 1: ")
    (answer,) = workers.load(format="auto")
    assert how(answer) == LOADED, "vLLM's own formats stay its own"


def test_two_ranks_adopt_together_or_not_at_all(workers: Workers) -> None:
    own = workers.states(ranks=2)
    assert own[0] != own[1]

    def load(*expected: str, **order: Any) -> None:
        answers = workers.load(ranks=2, **order)
        assert [each and each["state"] for each in answers] == own
        for answer, wanted in zip(answers, expected, strict=True):
            assert wanted in how(answer)

    reason = "changed more than parameters' bytes: model.names"
    load(reason, reason, odd="writes to a set", odd_rank=1)
    assert not workers.kept(), "what is offered is of all ranks"
    load(OFFERED, OFFERED)
    load(ADOPTED, ADOPTED, elsewhere=True)
    first, second = workers.kept()
    assert ("rank 0 of 2" in first, "rank 1 of 2" in second) == (True, True)
    assert first.partition(": ")[2] != second.partition(": ")[2], "ranks of all kinds are in the digest"
    workers.forget(second)
    load(OFFERED, OFFERED)
    assert workers.kept() == [first, second]
    flip_a_bit(workers.vault, second, 0)
    load("built anew and loaded from its files: ", "files: scale of ", elsewhere=True)
    assert workers.kept() == [first], "the one that is wrong is given to nobody else"
    load(OFFERED, OFFERED)
    load(ADOPTED, ADOPTED)


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_byte_that_has_changed_in_the_vault(
    script: Workers, start_vault: Callable[..., RunningVault], tmp_path: pathlib.Path, where: str
) -> None:
    """The model is built anew, and the one before it has gone by then."""
    spill = tmp_path / "spill"
    spill.mkdir(mode=0o700)
    files = ("--spill", str(spill), "--spill-size", "64MiB") if where == "files" else ()
    vault = start_vault("--keep-weights", "32MiB", *files)
    (own,) = script.states()
    assert how(*script.load()) == OFFERED
    if where == "files":
        other = vault.client("looks")
        other.reserve(other.gpus[0], [vault.status()["memory_bytes"]])
        other.close()
        eventually(lambda: vault.status()["spilled_bytes"] == 2 * MIB, "all is in files only")
        assert how(*script.load()) == ADOPTED
    flip_a_bit(vault, script.kept()[0], 0)
    for elsewhere, expected in ((True, "built anew"), (False, OFFERED), (True, ADOPTED)):
        assert expected in how(*script.load(elsewhere=elsewhere), own)


@pytest.mark.parametrize(
    ("odd", "path"),
    [
        ("sets a value", "model._modules['model'].scale"),
        ("changes a value", "._k_scale_float"),
        ("writes a buffer", "._buffers['_k_scale']"),
        ("writes a tensor that is no buffer", "model.tensors[0]"),
        ("fills a list", "model.config.architectures"),
        ("writes to a set", "model.names"),
        ("writes to an array", "model.array"),
        ("changes what a function knows", "model.known.<known>"),
        ("changes a class", "model.<class LlamaForCausalLM>.scale"),
        ("replaces a parameter", "._parameters['weight']"),
        ("moves a parameter", "._parameters['weight']"),
    ],
)
def test_a_load_that_changes_anything_else_is_not_offered(workers: Workers, odd: str, path: str) -> None:
    said = how(*workers.load(odd=odd))
    assert "not offered to the vault: loading has changed more than parameters' bytes: model" in said
    assert said.rpartition("[")[0].endswith(path.rpartition("[")[0]) if path.endswith("]") else said.endswith(path), (
        said
    )
    assert not workers.kept()


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ("says nothing", "its load_weights does not say what it has written"),
        ("leaves one out", "load_weights did not write model.layers.0.mlp.down_proj.weight (1 parameter in all)"),
        ("names what is no parameter", "_k_scale, which is no parameter"),
        ("writes what no file has", "load_weights did not write scale (1 parameter in all)"),
    ],
)
def test_a_load_that_does_not_say_what_it_wrote_is_not_offered(workers: Workers, odd: str, expected: str) -> None:
    assert expected in how(*workers.load(odd=odd))
    assert not workers.kept()


def another_byte(file: pathlib.Path) -> None:
    """Of the same size, and with the same time of modification."""
    facts, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_other_files_are_other_weights(workers: Workers, own: str) -> None:
    file = workers.model / "model.safetensors"
    try:
        said = how(*workers.load(odd="writes its file"))
        assert said.endswith("model.safetensors has changed meanwhile")
        assert not workers.kept()
        another_byte(file)
        assert how(*workers.load()) == OFFERED
        another_byte(file)
        for expected in (OFFERED, ADOPTED):
            (answer,) = workers.load()
            assert how(answer) == expected
            assert answer
            assert answer["state"] != own
    finally:
        another_byte(file)
    assert how(*workers.load(), own) == ADOPTED
    (workers.model / "adapters" / "task").mkdir(parents=True)
    for beside in ("quantize_config.json", "adapters/task/adapter_config.json"):
        (workers.model / beside).write_text("{}")
        assert how(*workers.load()) == OFFERED, beside
        (workers.model / beside).unlink()


OTHERS = ("hf_config", "hf_overrides", "dtype", "environment", "code", "version", "expert parallel")
QUANTISATIONS = ("quantisation", "quantisation's code")


def test_whatever_decides_about_bytes_is_in_the_key(workers: Workers) -> None:
    assert how(*workers.load()) == OFFERED
    for number, other in enumerate(OTHERS + QUANTISATIONS):
        assert how(*workers.load(other=other)) == OFFERED, other
        assert len(workers.kept()) == number + 2
    assert how(*workers.load(other="dtype")) == ADOPTED
    assert how(*workers.load()) == ADOPTED


def test_a_model_that_is_built_anew_has_the_quantisation_that_the_first_had(workers: Workers) -> None:
    assert how(*workers.load(other="quantisation")) == OFFERED
    flip_a_bit(workers.vault, workers.kept()[0], 0)
    (answer,) = workers.load(other="quantisation")
    assert "built anew" in how(answer)
    assert answer
    assert answer["ignored"] == "mamba.mamba"


def test_what_the_tokenizer_decides_about_is_not_offered(workers: Workers) -> None:
    assert "not offered to the vault: the tokenizer, too" in how(*workers.load(other="classifier"))


def test_what_a_model_reaches_may_raise(workers: Workers, own: str) -> None:
    reason = "cannot tell what loading changes: ReferenceError"
    assert reason in how(*workers.load(odd="loses what it has"), own)
    assert all(reason in how(each) for each in workers.load(ranks=2, odd="loses what it has", odd_rank=1))


def test_a_draft_model_does_not_reach_the_model_that_it_is_for(workers: Workers, own: str) -> None:
    assert how(*workers.load(other="another model"), own) == OFFERED


class TestWithout:
    def test_a_vault_that_keeps_weights(self, script: Workers, start_vault: Callable[..., RunningVault]) -> None:
        vault = start_vault()
        (own,) = script.states()
        for where in (str(vault.socket), "off"):
            assert how(*script.load(vault=where), own).endswith(
                "not offered to the vault: there is no vault with --keep-weights"
            )

    def test_a_vault_that_lives(self, workers: Workers, own: str) -> None:
        workers.vault.kill()
        assert "loaded from files, and not offered to the vault: " in how(*workers.load(), own)

    def test_room_for_them(self, script: Workers, start_vault: Callable[..., RunningVault]) -> None:
        start_vault("--keep-weights", "1MiB")
        assert "--keep-weights" in how(*script.load())

    def test_memory_of_this_layer(self, workers: Workers, own: str) -> None:
        assert how(*workers.load(ours=False), own).endswith("does not come from this layer: --enable-sleep-mode")


class TestKills:
    """At every request to the vault."""

    def test_of_a_worker(self, workers: Workers, own: str) -> None:
        for request in range(1, 100):
            was_kept = bool(workers.kept())
            (answer,) = workers.load(kill_at=request)
            if answer is not None:
                assert request > 5
                break
        assert how(answer, own) == ADOPTED if was_kept else OFFERED
        assert how(*workers.load(elsewhere=True), own) == ADOPTED

    @pytest.mark.parametrize("expected", [OFFERED, ADOPTED])
    def test_of_the_vault(self, script: Workers, start_vault: Callable[..., RunningVault], expected: str) -> None:
        """Its clients load as ever."""
        said = []
        for request in range(2, 100):
            vault = start_vault("--keep-weights", "32MiB")
            (own,) = script.states()
            if expected == ADOPTED:
                assert how(*script.load()) == OFFERED
            said.append(how(*script.load(kill_at=request, victim=vault.process.pid, elsewhere=True), own))
            if vault.process.poll() is None:
                break
        assert said[-1] == expected
        assert any("built anew" in each for each in said) == (expected == ADOPTED)
