"""models.yaml: what is allowed, and what is said of what is not."""

from __future__ import annotations

import json
import os
import pwd
import re
from pathlib import Path

import pytest

from cumem_sleep.http.asgi import not_canonical
from cumem_sleep.serve import servers
from cumem_sleep.serve.access import place_of
from cumem_sleep.serve.address import from_url
from cumem_sleep.serve.command import values
from cumem_sleep.serve.config import ConfigError, ModelConfig, load, parse, section
from cumem_sleep.serve.engines import ENGINES
from cumem_sleep.serve.engines.vllm import has_gate
from cumem_sleep.serve.policy import STOP
from cumem_sleep.settings import MOST_FILE_BYTES
from cumem_sleep.tools.shim import FOLDERS

EXAMPLE = """\
host_memory: 200GiB
front:
  port: 8080
  api_keys: [one, {env: SECOND_KEY}]
  admin_token: {file: TOKEN}
models:
  qwen-14b:
    command: vllm serve Qwen/Qwen3-14B --gpu-memory-utilization 0.9
    gpus: [0]
    idle: {1: 60s, 3: 10m, stop: 2h}
    keep: 30s
    aliases: [gpt-4o-mini]
  qwen-8b: {command: vllm serve Qwen/Qwen3-8B, gpus: [0]}
  theirs: {url: "http://10.0.0.7:8000/", gpus: [1], api_key: abc}
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device", "too long"])
def test_what_is_no_small_file_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "models.yaml"
    if kind == "a folder":
        file.mkdir()
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text("#" * (MOST_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="expected at most 1048576 bytes" if kind == "too long" else "a plain file"):
        load(file)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND_KEY", "two")
    (tmp_path / "token").write_text("secret\n")
    file = tmp_path / "models.yaml"
    file.write_text(EXAMPLE.replace("TOKEN", str(tmp_path / "token")))
    config = load(file)
    assert config.host_memory == 200 << 30
    assert (config.front.port, config.front.api_keys, config.front.admin_token) == (8080, ("one", "two"), "secret")
    large, small, theirs = config.models.values()
    assert large.command == ("vllm", "serve", "Qwen/Qwen3-14B", "--gpu-memory-utilization", "0.9")
    assert large.idle == ((60.0, 1), (600.0, 3), (7200.0, STOP))
    assert large.keep == 30.0
    assert small.idle_steps == ((300.0, 1),)
    assert small.spec("qwen-8b").levels == (1, 2, STOP)
    assert (theirs.url, theirs.spec("theirs").levels) == ("http://10.0.0.7:8000", (1, 2))
    assert config.names() == {
        "gpt-4o-mini": "qwen-14b",
        "qwen-14b": "qwen-14b",
        "qwen-8b": "qwen-8b",
        "theirs": "theirs",
    }


@pytest.mark.parametrize("written", ["[1, 0]", "1,0", '"0, 1"'])
def test_gpus_may_be_written_as_in_cuda_visible_devices(written: str) -> None:
    config = parse(f"models:\n  a:\n    command: vllm serve x\n    gpus: {written}\n")
    assert config.models["a"].gpus == (0, 1)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "{command: vllm serve x, gpuss: [0]}",
            "models.a.gpuss: unknown key: did you mean gpus? expected one of command, ",
        ),
        (
            "{command: vllm serve x, keep: 30x}",
            "models.a.keep: '30x': expected seconds from 0 to 315360000, or as 500ms, 60s or 1h30m",
        ),
        ("{command: vllm serve x, gpus: [0, 0]}", "models.a.gpus: expected each GPU once"),
        ("{command: vllm serve x, gpus: '0,0'}", "models.a.gpus: '0,0': expected each GPU once"),
        ("{command: vllm serve x, gpus: '0,'}", "models.a.gpus: '0,': expected a list of GPU numbers from 0"),
        ("{command: vllm serve x, gpus: [one]}", "models.a.gpus: expected a list of GPU numbers from 0"),
        ("{command: vllm serve x, share: 1.5}", "models.a.share: '1.5': expected a number above 0, and at most 1"),
        ("{command: vllm serve x, idle: {4: 1s}}", "models.a.idle: expected 1, 2, 3 or stop"),
        (
            "{command: vllm serve x, idle: {1: 2h, stop: 1m}}",
            "models.a.idle: expected a deeper sleep after a longer time",
        ),
        ("{command: vllm serve x, idle: 60s}", "models.a.idle: '60s': expected never, or depths with durations"),
        ("{command: vllm serve x, levels: [1, 1]}", "models.a.levels: expected each level once"),
        ("{command: vllm serve x, at_start: yes}", "models.a.at_start: 'yes': expected one of asleep, awake, stopped"),
        (
            "{command: vllm serve x, host_memory: 3XB}",
            "models.a.host_memory: '3XB': expected a number of bytes, as",
        ),
        ('{command: "vllm \'serve"}', "expected a command with valid shell quoting (No closing quotation)"),
        ("{command: vllm serve x, url: 'http://h:1'}", "models.a: expected either command or url, not both"),
        ("{}", "models.a: expected either command or url"),
        ("{url: 'h:1'}", "models.a.url: 'h:1': expected http://HOST:PORT"),
        (
            "{url: 'http://h:1', idle: {stop: 1h}}",
            "models.a.idle: a server by url cannot be stopped from here",
        ),
        ("{url: 'http://h:1', env: {A: b}}", "models.a.env: is only for servers with a command"),
        ("{command: vllm serve x, aliases: [a]}", "models.a.aliases.0: 'a': is taken by its own name or alias"),
        (
            "{command: vllm serve x, aliases: ['b c']}",
            "models.a.aliases.0: 'b c': expected a name of letters, digits",
        ),
        ("{command: vllm serve x --port 80}", "--port 80': --port is for this front to choose"),
        ("{command: vllm serve x --uds=/tmp/x}", "--uds is for this front to choose"),
        ("{command: [vllm, serve, x, --uds, '{socket}', '--host=::']}", "--host :: would open the server"),
        ("{command: 'env X=1 vllm serve x --host 10.0.0.1 --port {port}'}", "--host 10.0.0.1 would open the server"),
        (
            "{engine: command, command: 'my-server --host 0.0.0.0 --port {port}'}",
            "--host 0.0.0.0 would open the",
        ),
        ("{command: [sh, -c, 'cd /x;vllm serve x --host 0.0.0.0 --port {port}']}", "--host 0.0.0.0 would open the"),
        (
            "{command: [sh, -c, 'exec vllm serve x --port {port}']}",
            "write --uds {socket}, or --host 127.0.0.1 --port {por",
        ),
        ("{engine: vllm, command: python -m my_server}", "does not say where it listens: put {port} or {socket} where"),
        ("{engine: triton, command: 'x {port}'}", "models.a.engine: 'triton': expected one of vllm, sglang, command"),
        ("{command: 'sglang serve --model-path {socket}'}", "sglang has no Unix socket: leave {socket} out"),
        ("{command: sglang serve --model-path m --port 80}", "--port is for this front to choose"),
        ("{command: sglang serve --model-path m --host 0.0.0.0}", "--host 0.0.0.0 would open the server"),
        (
            "{command: [sh, -c, 'exec sglang serve --model-path m']}",
            "write --port {port} --enable-memory-saver --",
        ),
        ("{command: sglang serve --model-path m, idle: {2: 1m}}", "sglang has no such level: expected 1 or stop"),
        ("{command: sglang serve --model-path m, health: /x}", "models.a.health: '/x': is only for engine: command"),
        ("{url: 'http://h:1', engine: sglang}", "sglang cannot be asked whether it sleeps: expected a command"),
        ("{engine: command, command: ollama serve}", "does not say where it listens: put {port} or"),
        ("{engine: command, command: 'x {port}', levels: [1]}", "command has no such level: expected stop"),
        (
            "{engine: command, command: 'x {port}', health: health}",
            "models.a.health: 'health': expected a path, such",
        ),
        (
            "{command: 'python -m vllm.entrypoints.openai.api_server --model x --port 80'}",
            "--port is for this front to choose",
        ),
        ("{command: vllm serve x, share: much}", "models.a.share: 'much': expected a number above"),
        ("{command: vllm serve x, aliases: one}", "models.a.aliases: 'one': expected a list"),
        (
            "{command: vllm serve x, env: {CUMEM_SLEEP_IDLE_S: '60'}}",
            "models.a.env: expected no CUMEM_SLEEP_IDLE_S: when",
        ),
        ("{command: vllm serve x, env: {A: 1}}", "models.a.env.A: expected a string, in quotes if it looks"),
        ("7", "models.a: expected keys with values, not a list"),
        ('{command: ["", "{port}"]}', "models.a.command: expected a program"),
        ("{command: 'x {port}', engine: command, health: '//['}", "models.a.health: '//[': expected a path, such as"),
        ("{url: 'http://a..b:1'}", "models.a.url: 'http://a..b:1': expected http://HOST:PORT"),
        ("{url: 'http://256.1.1.1:1'}", "models.a.url: 'http://256.1.1.1:1': expected http://HOST:PORT"),
        ("{url: 'http://@:1'}".replace("@", "a" * 64), "expected http://HOST:PORT"),
        ("{url: 'unix:/@'}".replace("@", "a" * 107), "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH of"),
    ],
)
def test_what_is_wrong_with_a_model_is_named_with_its_line(model: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"models:\n  good: {{command: vllm serve x}}\n  a: {model}\n", "the.yaml")
    assert str(caught.value).startswith("the.yaml:3: ")
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the.yaml:1: models: expected at least one"),
        ("models: {}", "the.yaml:1: models: expected at least one"),
        ("models:\n  a: [", "the.yaml:2: not YAML: expected the node content"),
        (
            "models:\n  a: {command: vllm serve x}\n\n  a: {command: vllm serve y}",
            "the.yaml:4: not YAML: a key is there twice, on line 2 already, at column 3",
        ),
        (
            "models:\n  a b: {command: vllm serve x}",
            "the.yaml:2: models.a b: expected a name of letters, digits and . _ : / @ + -",
        ),
        (
            "models:\n  a: {command: vllm serve x}\n  b: {command: vllm serve x, aliases: [a]}",
            "the.yaml:3: models.b.aliases.0: 'a': is taken by",
        ),
        (
            "models: {a: {command: vllm serve x}}\nhost_memory: lots",
            "the.yaml:2: host_memory: 'lots': expected a number of bytes",
        ),
        (
            "models: {a: {command: vllm serve x}}\nfront: {prot: 1}",
            "the.yaml:2: front.prot: unknown key: did you mean port?",
        ),
        (
            "models: {a: {command: vllm serve x}}\nfront: {port: 99999}",
            "the.yaml:2: front.port: '99999': expected a whole number from 0 to 65535",
        ),
        (
            "models: {a: {command: vllm serve x}}\nfront: {allowed_hosts: ['a:80']}",
            "the.yaml:2: front.allowed_hosts.0: 'a:80': expected a host name or an IP address, without a port",
        ),
        (
            "models: {a: {command: vllm serve x}}\nmodel: 3",
            "the.yaml:2: model: unknown key: did you mean models?",
        ),
        (
            "models: {a: {command: vllm serve x}}\n? [1]\n: 2",
            "the.yaml:2: not YAML: found unhashable key",
        ),
        ("models: {a: !!python/name:os.system {}}", "the.yaml:1: "),
        (
            "models: {a: {command: x, keep: !env X}}",
            "the.yaml:1: not YAML: could not determine a constructor for the tag '…'",
        ),
        ("models: {a: {command: x, keep: 2024-13-45}}", "the.yaml: not YAML: a value is not what its tag or"),
        ("models: {a: {command: x, keep: !!int foo}}", "the.yaml: not YAML: a value is not what its tag or"),
        (f"models: {{a: {{command: x, keep: {'9' * 400}}}}}", "the.yaml:1: models.a.keep: '99"),
        ("models: {a: {command: x, keep: .inf}}", "the.yaml:1: models.a.keep: '.inf': expected seconds"),
        (f"host_memory: {'9' * 400}GiB", "the.yaml:1: host_memory: '99"),
        ("[" * 500, "the.yaml: lists and mappings are nested too deeply"),
        ("models: {a: {<<: common}}", "the.yaml:1: not YAML: expected a mapping or list of mappings for merging"),
        ("models: {a: {url: 'http://a:b'}}", "the.yaml:1: models.a.url: 'http://a:b': expected http://HOST:PORT"),
        ("models: {a: {url: 'http://h:99999'}}", "the.yaml:1: models.a.url: 'http://h:99999': expected http://HOST"),
        ("models: {a: {url: 'http://u:p@h'}}", "the.yaml:1: models.a.url: 'http://u:p@h': expected http://HOST:PORT"),
        ("vault: {}\nmodels: {a: {command: vllm serve x}}", "the.yaml:1: vault.memory: expected how much host memory"),
        ("vault: {memory: much}\nmodels: {a: {command: vllm serve x}}", "the.yaml:1: vault.memory: 'much': expected a"),
        (
            "vault: {memory: 1GiB, spill: /x}\nmodels: {a: {command: vllm serve x}}",
            "the.yaml:1: vault: expected both spill and spill_size, or neither",
        ),
        ("front: {host: ''}\nmodels: {a: {command: vllm serve x}}", "the.yaml:1: front.host: '': expected a name or"),
    ],
)
def test_what_is_wrong_with_the_file_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "the.yaml")
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("file", ['"\\0"', "~nobody-of-this-name/token"])
def test_a_secret_in_a_file_that_cannot_be_is_a_fault(file: str) -> None:
    with pytest.raises(ConfigError, match=r"front.admin_token: expected a secret that can be read: "):
        parse(f"front: {{admin_token: {{file: {file}}}}}\nmodels: {{a: {{command: vllm serve x}}}}\n")


def test_a_long_value_is_shown_in_part_without_the_keys_in_it() -> None:
    """Masked first: what is cut might not look like a key any more."""
    command = f"x http://{'u' * 80}:hunter22@h {'y' * 5000}"
    with pytest.raises(ConfigError) as caught:
        parse(f"models: {{a: {{engine: command, command: '{command}'}}}}")
    assert "hunter" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_every_fault_is_named_and_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    text = "front:\n  api_keys: ['se cret', {env: NO_SUCH_VARIABLE}]\n  admin_token: {file: /nonexistent}\n"
    with pytest.raises(ConfigError) as caught:
        parse(f"{text}models: {{a: {{command: vllm serve x}}}}\n", "the.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["front.api_keys.0", "front.api_keys.1", "front.admin_token"]
    assert "se cret" not in str(caught.value)
    assert "the environment variable NO_SUCH_VARIABLE is not set" in lines[1]
    assert "/nonexistent" in lines[2]


@pytest.mark.parametrize(
    "text",
    [
        "a: [SECRET]",
        "a: {apikey: [SECRET]}",
        "a: {apikey: SECRET}",
        "a: {admin-token: SECRET}",
        "a: {api_key: [SECRET]}",
        "a: {env: [SECRET]}",
        "a: {env: {HF_TOKEN=SECRET: x}}",
        "a: {env: {HF=SECRET: 1}}",
        "a: {password: SECRET}",
        "a: {xyzzy: [SECRET]}",
        "a: {admin_token:SECRET}",
        "a: {admin_token=SECRET: 1}",
        "a: {admin_token SECRET: 1}",
        "a: admin_token:SECRET",
        "a: {idle: {1: 1s, password: SECRET}}",
        "a: {keep: {password: SECRET}}",
        "a: {keep: [{x: SECRET}]}",
        "a: {keep: 'api_key:SECRET'}",
        "a: {keep: 'api_key: SECRET'}",
        "a: {api_key: *SECRET}",
        "a: {api_key: !SECRET}",
        "admin_token:SECRET",
        "admin_token:SECRET: 1",
        "password: SECRET",
    ],
)
def test_what_may_be_a_secret_or_hold_one_is_not_shown(text: str) -> None:
    flat = text.replace("{", "\n  ").replace("}", "")
    for whole in (
        f"models: {{{text}}}",
        f"models:\n {flat}",
        f"front:\n {flat}",
        f"front:\n- {flat}",
        f"front: [{{{text}}}]",
        f"front: {{{text}}}",
        f"- {{{text}}}",
    ):
        with pytest.raises(ConfigError) as caught:
            parse(whole)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("known", ["front: {admin_token: same, api_keys: [other, same]}", "front: {admin_token: same}"])
def test_an_admin_token_is_for_operators_alone(known: str) -> None:
    key = "" if "api_keys" in known else ", api_key: same"
    with pytest.raises(ConfigError, match=r":1: front.admin_token: is an API key, too: expected a token"):
        parse(f"{known}\nmodels: {{a: {{command: vllm serve x{key}}}}}")
    parse(f"{known.replace('token: same', 'token: another')}\nmodels: {{a: {{command: vllm serve x{key}}}}}")


@pytest.mark.parametrize("name", ["a/../b", "a/./b", "x//y", "x/", "x/..", "x/.../y"])
def test_a_name_that_no_path_can_have_is_refused(name: str) -> None:
    for text in (f"{{{name}: {{command: vllm serve x}}}}", f"{{a: {{command: vllm serve x, aliases: [{name}]}}}}"):
        with pytest.raises(ConfigError, match=r"expected a name of letters, digits and \. _ : / @"):
            parse(f"models: {text}")


@pytest.mark.parametrize("name", ["a/b", "a/.b", "a/..b/c.", "Qwen/Qwen3-8B:latest", "a../b", "a@1+x"])
def test_a_name_that_a_path_can_have_is_found_in_one(name: str) -> None:
    parse(f"models: {{'{name}': {{command: vllm serve x}}}}")
    path = f"/models/{name}/v1/completions"
    assert not not_canonical({"path": path, "raw_path": path.encode()})
    place = place_of(path)
    assert place is not None
    assert (place.model, place.target) == (name, "/v1/completions")


def test_models_may_share_settings_through_an_anchor() -> None:
    text = "models:\n  a: &common {command: vllm serve x, keep: 1h}\n  b: {<<: *common, command: vllm serve y}\n"
    config = parse(text)
    assert (config.models["b"].keep, config.models["b"].command) == (3600.0, ("vllm", "serve", "y"))


def test_what_the_documentation_shows_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ADMIN_TOKEN", "CUMEM_SLEEP_ADMIN_TOKEN"):
        monkeypatch.setenv(variable, "secret")
    page = (Path(__file__).parents[2] / "docs" / "several-models.md").read_text()
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert shown
    for text in (*shown, (Path(__file__).parents[2] / "examples" / "ten_models.yaml").read_text()):
        parse(text)


# What becomes of a command


def test_vllm_is_told_where_to_listen_what_it_is_called_and_to_have_sleep_mode() -> None:
    model = section(ModelConfig)({"command": "vllm serve Qwen/Qwen3-8B", "aliases": ["gpt"]})
    words = servers.command_line("qwen", model, from_url("unix:/run/q.sock", None))
    assert words[3:] == ["--uds", "/run/q.sock", "--enable-sleep-mode", "--served-model-name", "qwen", "gpt"]


def test_vllm_takes_its_weights_from_a_vault_that_keeps_them_unless_its_command_says_otherwise() -> None:
    cases = [("vllm serve m", "t", ["cumem_sleep"]), ("vllm serve m --load-format=auto", "t", ["auto"])]
    for command, token, formats in [*cases, ("vllm serve m", None, [])]:  # without the gate it may not know the loader
        model = section(ModelConfig)({"command": command})
        words = servers.command_line("m", model, from_url("unix:/run/m.sock", None), token, from_vault=True)
        assert values(words, "--load-format") == formats


def test_what_a_command_says_itself_is_left_as_it_is() -> None:
    command = "/opt/bin/vllm serve m --enable-sleep-mode --served-model=mine --host 127.0.0.1 --port {port}"
    model = section(ModelConfig)({"command": command})
    words = servers.command_line("qwen", model, from_url("http://127.0.0.1:8123", None))
    assert words == command.replace("{port}", "8123").split()
    other = section(ModelConfig)({"command": "my-server --socket {socket}"})
    assert servers.command_line("x", other, from_url("unix:/s", None)) == ["my-server", "--socket", "/s"]


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --port {port}",
        "vllm serve m --port={port}",
        "env A=1 vllm serve m --master-port {port}",
        "python -m vllm.entrypoints.openai.api_server --model m --port {port}",
        "python /x/vllm/entrypoints/openai/api_server.py --model m --port {port}",
    ],
)
def test_a_vllm_with_a_port_listens_on_the_loopback_interface_alone(command: str) -> None:
    model = parse(json.dumps({"models": {"m": {"command": command}}})).models["m"]
    words = servers.command_line("m", model, from_url("http://127.0.0.1:8123", None))
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "--port=8123" in words or words[words.index("--port") + 1] == "8123"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_a_server_is_asked_at_the_loopback_address_where_it_listens(host: str, tmp_path: Path) -> None:
    for command in (
        f"vllm serve m --host={host} --port {{port}}",
        f"my-server --host {host} --port {{port}}",
        f"sh -c 'exec vllm serve m --host {host} --port {{port}}'",
    ):
        engine = {"engine": "vllm"} if command.startswith("my-server") else {}
        model = parse(json.dumps({"models": {"m": {"command": command, **engine}}})).models["m"]
        address = servers.Server("m", model, tmp_path, tmp_path)._new_address(None)
        assert address.base_url.rpartition(":")[0] == f"http://{'[::1]' if host == '::1' else host}"
        words = servers.command_line("m", model, address)
        assert len([word for word in words if "--host" in word]) == 1


def test_a_vllm_in_a_text_for_a_shell_may_say_itself_where_it_listens() -> None:
    command = ["sh", "-c", "A=1; exec vllm serve m --uds {socket}"]
    model = parse(json.dumps({"models": {"m": {"command": command}}})).models["m"]
    words = servers.command_line("m", model, from_url("unix:/run/m.sock", None))
    assert words == ["sh", "-c", "A=1; exec vllm serve m --uds /run/m.sock"]


def test_a_server_gets_its_gpus_and_no_secret_of_the_front() -> None:
    model = section(ModelConfig)({"command": "x", "gpus": [1, 2], "env": {"A": "b", "CUMEM_SLEEP_PREPARE": "0"}})
    inherited = {
        "CUDA_VISIBLE_DEVICES": "4,5,7",
        "VLLM_API_KEY": "k",
        "CUMEM_SLEEP_SERVE_TOKEN_FILE": "t",
        "HOME": "/h",
    }
    inherited["CUMEM_SLEEP_SERVE_TOKEN"] = "t"
    found = servers.environment(model, inherited)
    assert found["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    assert (found["A"], found["CUMEM_SLEEP_PREPARE"], found["HOME"]) == ("b", "0", "/h")
    with pytest.raises(servers.StartFailed, match="there is no GPU 2: CUDA_VISIBLE_DEVICES has 1"):
        servers.environment(model, {"CUDA_VISIBLE_DEVICES": "4"})
    assert not {"VLLM_API_KEY", "CUMEM_SLEEP_SERVE_TOKEN", "CUMEM_SLEEP_SERVE_TOKEN_FILE"} & found.keys()


def test_a_server_does_not_sleep_or_wake_by_settings_of_the_front() -> None:
    of_front = {"CUMEM_SLEEP_IDLE_S": "60", "CUMEM_SLEEP_ON_REQUEST": "wake", "CUMEM_SLEEP_DEEP_AFTER_S": "60"}
    found = servers.environment(section(ModelConfig)({"command": "x"}), {**of_front, "HOME": "/h"})
    assert found["HOME"] == "/h"
    assert not of_front.keys() & found.keys()


def test_a_server_with_the_gate_needs_no_development_mode() -> None:
    inherited = {"VLLM_SERVER_DEV_MODE": "1", "CUMEM_SLEEP_ADMIN": "unix:/x", "CUMEM_SLEEP_ADMIN_TOKEN": "of others"}
    model = section(ModelConfig)({"command": "x"})
    found = servers.environment(model, inherited, token="t")
    assert found["CUMEM_SLEEP_ADMIN_TOKEN"] == "t"
    assert not {"VLLM_SERVER_DEV_MODE", "CUMEM_SLEEP_ADMIN"} & found.keys()
    own = {"VLLM_SERVER_DEV_MODE": "1", "CUMEM_SLEEP_ADMIN_TOKEN": "another", "CUMEM_SLEEP_ADMIN_TOKEN_FILE": "/t"}
    found = servers.environment(section(ModelConfig)({"command": "x", "env": own}), own, token="t")
    assert found["CUMEM_SLEEP_ADMIN_TOKEN_FILE"] == ""
    assert (found["VLLM_SERVER_DEV_MODE"], found["CUMEM_SLEEP_ADMIN_TOKEN"]) == ("1", "t")


@pytest.mark.parametrize("lib", ["lib/python3.12/site-packages", "lib/python3.12/dist-packages", None])
@pytest.mark.parametrize(
    "command", ["vllm serve m", "{bin}/vllm serve m", "python -m vllm.entrypoints.cli.main serve m"]
)
def test_a_vllm_gets_the_gate_where_this_package_is_installed(tmp_path: Path, command: str, lib: str | None) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python", "my-server"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    if lib is not None:
        (tmp_path / lib / "cumem_sleep-0.1.0.dist-info").mkdir(parents=True)
    path = str(tmp_path / "bin")
    words = command.format(bin=path).split()
    variables = {"PATH": path, "VLLM_USE_RUST_FRONTEND": "0"}
    assert has_gate(words, variables) == (lib is not None)
    assert not has_gate(words, {**variables, "VLLM_USE_RUST_FRONTEND": "1"}), "which would not start with it"
    assert not has_gate(words, {"PATH": "/nowhere"}) or command.startswith("{bin}")
    assert not has_gate(["my-server", "{socket}"], variables)
    assert not has_gate(["python", "-m", "my_server", "{socket}"], variables)
    assert not has_gate(["sh", "-c", "exec vllm serve m --uds {socket}"], variables)


def test_a_linked_vllm_is_looked_for_where_the_link_leads(tmp_path: Path) -> None:
    tool, local = tmp_path / "tools/vllm", tmp_path / "local"
    for place in (tool, local):
        (place / "bin").mkdir(parents=True)
    for name in ("vllm", "python"):
        (tool / "bin" / name).touch(mode=0o755)
        (local / "bin" / name).symlink_to(tool / "bin" / name)
    (local / "lib/python3.12/site-packages/cumem_sleep-0.1.0.dist-info").mkdir(parents=True)
    variables = {"PATH": str(local / "bin")}
    assert not has_gate(["vllm", "serve", "m"], variables)
    assert has_gate(["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"], variables), "such as that of a venv"


@pytest.mark.parametrize("program", ["./vllm", "./python"])
def test_a_vllm_may_be_where_the_front_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.chdir(tmp_path / "bin")
    command = [program, "-m", "vllm", "serve", "m"]
    assert not has_gate(command, {"PATH": "/nowhere"})
    (tmp_path / "lib/python3.12/site-packages/cumem_sleep-0.1.0.dist-info").mkdir(parents=True)
    assert has_gate(command, {"PATH": "/nowhere"})


@pytest.mark.parametrize(
    "given", ["--middleware cumem_sleep.vllm.SleepGate", "--middleware=cumem_sleep.vllm.SleepGate", ""]
)
def test_a_vllm_has_the_gate_once(given: str) -> None:
    command = f"vllm serve m {given}".split()
    assert has_gate(command, {"PATH": "/nowhere"}) == bool(given)
    model = section(ModelConfig)({"command": command})
    address = from_url("unix:/s", None)
    words = servers.command_line("m", model, address, "t")
    assert " ".join(words).count("cumem_sleep.vllm.SleepGate") == 1
    assert "SleepGate" in given or "--middleware" not in servers.command_line("m", model, address)
    assert has_gate(["sh", "-c", f"exec vllm serve m --uds {{socket}} {given}"], {"PATH": "/nowhere"}) == bool(given)


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("vllm serve m", "vllm"),
        ("my-wrapper {port}", "vllm"),
        ("sglang serve --model-path m", "sglang"),
        ("/opt/bin/python3 -m sglang.launch_server --model-path m", "sglang"),
        ("python -msglang.launch_server --model-path m", "sglang"),
        ("env A=1 python /x/sglang/launch_server.py --model-path m", "sglang"),
        ("sh -c 'exec sglang serve --port {port} --enable-memory-saver --enable-weights-cpu-backup'", "sglang"),
    ],
)
def test_a_command_says_which_engine_it_starts(command: str, engine: str) -> None:
    (model,) = parse(json.dumps({"models": {"m": {"command": command}}})).models.values()
    assert model.kind is ENGINES[engine]
    (named,) = parse(json.dumps({"models": {"m": {"command": "x {port}", "engine": engine}}})).models.values()
    assert named.kind is ENGINES[engine]


def test_an_sglang_listens_here_and_keeps_its_weights_when_it_releases_them() -> None:
    model = section(ModelConfig)({"command": "sglang serve --model-path m", "aliases": ["gpt"]})
    words = servers.command_line("qwen", model, from_url("http://127.0.0.1:8123", None))
    added = "--host 127.0.0.1 --port 8123 --served-model-name qwen --enable-memory-saver --enable-weights-cpu-backup"
    assert words == [*["sglang", "serve", "--model-path", "m"], *added.split()]
    whole = {"command": " ".join(words)}
    assert servers.command_line("q", section(ModelConfig)(whole), from_url("http://127.0.0.1:1", None)) == words


@pytest.mark.parametrize("program", ["sglang serve", "python -m sglang.launch_server"])
def test_an_sglang_gets_this_layer_where_this_package_is_installed(tmp_path: Path, program: str) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sglang", "python"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    env = {"PATH": f"{tmp_path}/bin", "PYTHONPATH": "/mine"}
    model = section(ModelConfig)({"command": f"{program} --model-path m", "env": env})
    assert servers.environment(model, {})["PYTHONPATH"] == "/mine"
    packages = tmp_path / "lib/python3.12/site-packages"
    (packages / "cumem_sleep-0.1.0.dist-info").mkdir(parents=True)
    here = FOLDERS["torch_memory_saver"]
    assert servers.environment(model, {})["PYTHONPATH"] == f"{here}:/mine", "as of an editable installation"
    there = packages / "cumem_sleep" / here.relative_to(Path(servers.__file__).parents[1])
    there.mkdir(parents=True)
    found = servers.environment(model, {})
    assert found["PYTHONPATH"] == f"{there}:/mine"
    assert found["TMS_RETAIN_CPU_BACKUP"] == "1"
    assert not {"VLLM_SERVER_DEV_MODE", "CUMEM_SLEEP_PREPARE"} & found.keys()


def test_a_server_without_sleep_mode_is_stopped_when_it_is_idle_and_started_when_it_is_asked() -> None:
    text = "models: {m: {engine: command, command: 'llama-server --port {port}', health: /v1/models}}"
    spec = parse(text).models["m"].spec("m")
    assert (spec.idle, spec.levels, spec.at_start) == (((300.0, STOP),), (STOP,), "stopped")
    sglang = parse("models: {m: {command: sglang serve --model-path m}}").models["m"].spec("m")
    assert (sglang.idle, sglang.levels, sglang.at_start) == (((300.0, 1),), (1, STOP), "asleep")


@pytest.mark.parametrize("state", ["", "relative"])
def test_who_has_no_home_may_still_name_a_folder_of_logs(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user of a container that nobody knows. The XDG specification has relative paths ignored."""
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert servers.default_logs() == Path("/.local/state/cumem-sleep/serve")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert servers.default_logs() == Path("/state/cumem-sleep/serve")


def test_files_of_different_models_differ() -> None:
    names = ["a/b", "a_b", "a" * 60, "a" * 61, "ok"]
    files = {servers.Server(name, section(ModelConfig)({"command": "x"}), Path("/l"), Path("/s")).log for name in names}
    assert len(files) == len(names)
    assert all(len(file.name) < 60 for file in files)
