"""`cumem-sleep serve` as a process, and the commands that ask it."""

from __future__ import annotations

import asyncio
import errno
import http.server
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers_of_tests import command

from cumem_sleep.serve import hardware
from cumem_sleep.serve.config import Config, ConfigError
from cumem_sleep.serve.lock import Lock
from cumem_sleep.serve.main import _Reloader
from cumem_sleep.tools import cli
from cumem_sleep.tools import serve as tools

TOKEN = "secret"
FORGED = "it failed\nforged\x1b[2J\u202e\x9b\r"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that a front takes


def write(file: Path, port: int = 0, **models: dict[str, Any]) -> Path:
    whole = {
        name: {"engine": "vllm", "command": command(name), "idle": "never", **model} for name, model in models.items()
    }
    front = {"port": port, "admin_token": TOKEN}
    text = json.dumps({"front": front, "logs": str(file.parent / "logs"), "models": whole})
    file.with_suffix(".new").write_text(text)
    os.replace(file.with_suffix(".new"), file)
    return file


class Command:
    """One that runs; `log` is what it has said."""

    def __init__(self, *arguments: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            started = [sys.executable, "-m", "cumem_sleep", "serve", *arguments]
            self.process = subprocess.Popen(started, stdout=file, stderr=file, env=env)

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it says something."""
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return found

    @property
    def url(self) -> str:
        return self.says(r"listens at (http://127.0.0.1:\d+)")[1]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait() == 0, self.log.read_text()


def answer_of(front: Command, model: str) -> str:
    """What one of the demo's models says."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "?"}]}).encode()
    with urllib.request.urlopen(f"{front.url}/v1/chat/completions", body, timeout=60) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


@contextmanager
def running(*arguments: str, log: Path, env: dict[str, str] | None = None) -> Iterator[Command]:
    started = Command(*arguments, log=log, env=env)
    try:
        yield started
        started.end()
    finally:
        started.process.kill()
        started.process.wait()


def test_check_shows_what_a_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "models.yaml", one={"aliases": ["gpt"], "keep": "90s"})
    assert cli.main(["serve", str(file), "--check"]) == 0
    assert re.search(r"one +0 +1 +never +90 s +gpt", capsys.readouterr().out)
    file.write_text("models: {one: {comand: x}}")
    assert cli.main(["serve", str(file), "--check"]) == 2
    assert f"{file}:1: models.one.comand: unknown key: did you mean command?" in capsys.readouterr().err
    file.write_text("models:\n  one: {command: vllm serve m, gpus: [-1]}\n  two: {command: vllm serve m, keep: long}\n")
    assert cli.main(["serve", str(file), "--check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].split(": ")[:2] for line in lines] == [
        [f"{file}:2", "models.one.gpus"],
        [f"{file}:3", "models.two.keep"],
    ]


def test_logs_that_cannot_be_written_end_it_before_it_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "models.yaml", small={})
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert cli.main(["serve", str(file)]) == 2
    assert re.search(r"logs: nothing can be written to \S+/logs \(.+\): name another folder", capsys.readouterr().err)
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL]


def test_check_names_what_will_not_work_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(*options: str, front: str = "{}", vault: Any = None, **model: Any) -> tuple[int, str]:
        file = tmp_path / "models.yaml"
        section = f"vault: {json.dumps(vault)}\n" if vault else ""
        file.write_text(f"front: {front}\n{section}models: {json.dumps({'one': {'command': command('one'), **model}})}")
        code = cli.main(["serve", str(file), "--check", *options])
        said = capsys.readouterr()
        assert ("is valid" in said.out) == (code == 0)
        return code, said.out + said.err

    monkeypatch.setattr(hardware, "gpus", lambda _: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checked()[0] == 0
    assert "models.one.gpus: there is no GPU 7: this machine shows none" in checked(gpus=[7])[1]
    monkeypatch.setattr(hardware, "gpus", lambda _: [hardware.Gpu(0, "GPU-0", "H200", 1, 0)])
    assert checked(gpus=[0])[0] == 0
    code, said = checked(gpus=[0, 7])
    assert (code, "there is no GPU 7: there are 0" in said) == (2, True)
    assert "host: 0.0.0.0 is open to other machines, and there are no keys" in checked("--host", "0.0.0.0")[1]
    assert checked("--host", "0.0.0.0", front="{api_keys: [secret]}")[0] == 0
    assert checked(front="{host: localhost}")[0] == 0
    for each in ("vllm serve m", "/no/where/vllm serve m"):
        code, said = checked(command=each)
        assert (code, "vllm' here: install it, or write its path" in said) == (2, True), each
    (tmp_path / "vllm").symlink_to("/bin/sh")
    assert checked(command="vllm serve m")[0] == 0
    code, said = checked(vault={"memory": "1000TiB", "spill": "/no/where", "spill_size": "1GiB"})
    assert code == 2
    assert "vault.memory: this host has" in said
    assert "vault.spill: nothing can be written to /no/where" in said
    assert checked(vault={"memory": "1MiB", "spill": str(tmp_path), "spill_size": "1GiB"})[0] == 0


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({}, r"5\.0 GiB \(what the host has free now\)"),
        ({"host_memory": "9GiB"}, r"9\.0 GiB \(host_memory\)"),
        ({"vault": {"memory": "4GiB"}}, r"4\.0 GiB \(the vault's memory\)"),
    ],
)
def test_check_says_how_much_kv_cache_may_be_kept(
    keys: dict[str, Any],
    left: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "host_available_bytes", lambda: 7 << 30)
    file = tmp_path / "models.yaml"
    budgets: dict[str, dict[str, str]] = {"one": {}, "two": {"CUMEM_SLEEP_KEEP_KV_BYTES": "auto"}}
    file.write_text(
        json.dumps({"models": {name: {"command": command(name), "env": env} for name, env in budgets.items()}, **keys})
    )
    assert cli.main(["serve", str(file), "--check"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"models\.(\w+) keeps of its KV cache what backups leave of (.+?\))", said) == [
        ("two", *re.findall(left, said))
    ]


def test_check_shows_no_key_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.yaml"
    for words in ("--api-key geheimnis", "--api-key=geheimnis", "--api_key geheimnis other", "--api-k geheimnis"):
        file.write_text(json.dumps({"models": {"one": {"command": f"vllm serve m {words}", "gpus": [99]}}}))
        assert cli.main(["serve", str(file), "--check"]) == 2
        file.write_text(json.dumps({"models": {"one": {"command": f"vllm serve m --port 1 {words}"}}}))
        assert cli.main(["serve", str(file), "--check"]) == 2
        said = capsys.readouterr()
        assert "--port is for this front to choose" in said.err
        assert "vllm serve m" in said.out
        assert "geheimnis" not in said.out + said.err


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_before_anything_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = write(tmp_path / "models.yaml", port=taken.getsockname()[1], small={})
        runtime = tmp_path / "run"
        runtime.mkdir()
        started = subprocess.run(
            [sys.executable, "-m", "cumem_sleep", "serve", str(file)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime)},
        )
    assert started.returncode == 2
    assert re.search(r"cannot listen at 127.0.0.1, port \d+ \(Address already in use\).* --port", started.stderr)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["models.yaml", "run"]
    assert not list(runtime.iterdir())


@pytest.mark.slow
def test_a_second_front_on_the_same_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "models.yaml", one={"at_start": "stopped"})
    (tmp_path / "link.yaml").symlink_to(file)
    with running(str(file), log=tmp_path / "log") as front:
        assert front.url
        for same in (str(file), str(tmp_path / "link.yaml"), os.path.relpath(file)):
            assert cli.main(["serve", same, "--port", "0"]) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert f"another `cumem-sleep serve` (pid {front.process.pid}) serves {file}" in said
        assert cli.main(["serve", str(file), "--check"]) == 0
        other = write(tmp_path / "other.yaml", one={"at_start": "stopped"})
        with running(str(other), log=tmp_path / "other.log") as second:
            assert second.url
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_lock_that_is_no_plain_file_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, lock = write(tmp_path / "models.yaml", one={}), tmp_path / ".models.yaml.lock"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to(tmp_path / "other")}[kind](lock)
    assert cli.main(["serve", str(file)]) != 0
    assert str(lock) in "".join(capsys.readouterr().err.split("\n"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
def test_where_no_file_can_be_locked_nobody_else_is_blamed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match=r"cannot be locked .* file system of this machine"):
        Lock(write(tmp_path / "models.yaml", one={}))


@pytest.mark.slow
def test_a_front_after_one_that_was_killed_waits_for_its_servers(tmp_path: Path) -> None:
    """They have the GPU until they have ended."""
    stays = f"test -e {tmp_path}/polite || trap '' TERM; {command('one')}; true"
    file = write(tmp_path / "models.yaml", one={"command": ["sh", "-c", stays]})
    front = Command(str(file), log=tmp_path / "log")
    front.says("one: sleep in")
    reaper = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split()[0]
    front.process.kill()
    front.process.wait()
    (tmp_path / "polite").touch()
    with running(str(file), log=tmp_path / "log.2") as second:
        assert second.url
        assert not alive(reaper)
    assert not list(tmp_path.glob(".*"))


def test_requests_are_answered_while_the_file_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop, may_read = asyncio.get_running_loop(), threading.Event()

        def load(_: Path) -> Config:
            loop.call_soon_threadsafe(may_read.set)
            assert may_read.wait(60)
            raise ConfigError("it is wrong")

        said = asyncio.Queue[str]()
        reloader = _Reloader(None, tmp_path, load, said.put_nowait)  # type: ignore[arg-type]
        reloader.wanted.set()
        running = asyncio.create_task(reloader.run())
        assert await said.get() == "the configuration stays as it is: it is wrong"
        running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
def test_a_server_has_no_secret_but_its_own(tmp_path: Path) -> None:
    secrets = {"ADMIN": "admin-token", "CLIENT": "client-key", "KEY_ONE": "key-of-one", "KEY_TWO": "key-of-two"}
    also = {"COPY": "admin-token", "HEADER": "Authorization: Bearer a-long-token-in-a-file", "KEPT": "nothing secret"}
    (tmp_path / "token").write_text("a-long-token-in-a-file\n")
    models = {}
    for name in ("one", "two"):
        key = {"env": f"KEY_{name.upper()}"}
        models[name] = {"command": ["sh", "-c", f"env > {tmp_path / name}; exec {command(name)}"], "api_key": key}
    keys = [{"env": "CLIENT"}, {"file": str(tmp_path / "token")}, "in-the-file-itself"]
    front = {"port": 0, "admin_token": {"env": "ADMIN"}, "api_keys": keys}
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"front": front, "logs": str(tmp_path / "logs"), "models": models}))
    variables = {**os.environ, **secrets, **also, "LITERAL": "in-the-file-itself"}
    with running(str(file), log=tmp_path / "log", env=variables) as started:
        started.says("one: sleep in")
        started.says("two: sleep in")
    for name in models:
        found = (tmp_path / name).read_text()
        assert f"KEY_{name.upper()}=key-of-{name}\n" in found
        assert f"VLLM_API_KEY=key-of-{name}\n" in found
        assert "KEPT=nothing secret\n" in found
        others = {*secrets.values(), "a-long-token-in-a-file", "in-the-file-itself"} - {f"key-of-{name}"}
        assert [each for each in others if each in found] == []


@pytest.mark.slow
def test_logs_are_for_their_user_alone_and_hold_no_keys(tmp_path: Path) -> None:
    key = "a-key-of-the-server"
    words = f"{command('one')} --api-key {key} --hf-token=hf_geheim --max-num-batched-tokens 8192"
    loud = ["sh", "-c", f"echo token {key}; exec {words}"]
    file = write(tmp_path / "models.yaml", one={"command": words}, two={"command": loud, "api_key": key})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "one.log").write_text("from before\n")
    (tmp_path / "logs" / "one.log").chmod(0o644)
    with running(str(file), log=tmp_path / "log") as front:
        front.says("one: sleep in")
        front.says("two: sleep in")
        asked = urllib.request.Request(f"{front.url}/admin/log?model=two", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            shown = answer.read().decode()
    assert {log.stat().st_mode & 0o777 for log in (tmp_path / "logs").iterdir()} == {0o600}
    one = (tmp_path / "logs" / "one.log").read_text()
    assert one.startswith("from before\n")
    assert "--max-num-batched-tokens 8192" in one
    assert "--api-key ***" in one
    assert (key in one, "hf_geheim" in one, key in shown) == (False, False, False)
    assert "token ***" in shown


def test_nobody_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", "http://127.0.0.1:1")
    assert cli.main(["status"]) == 2
    assert "no `cumem-sleep serve` answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert cli.main(["wake", "m", "--url", "nonsense"]) == 2
    assert "'nonsense': expected a URL such as" in capsys.readouterr().err
    for url in ("http://[::1", "http://127.0.0.1:99999"):
        assert cli.main(["wake", "m", "--url", url]) == 2
        assert "expected a URL such as" in capsys.readouterr().err
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN_FILE", "/nowhere")
    assert cli.main(["status"]) == 2
    assert "CUMEM_SLEEP_SERVE_TOKEN_FILE='/nowhere': expected a file that can be read" in capsys.readouterr().err
    monkeypatch.delenv("CUMEM_SLEEP_SERVE_TOKEN_FILE")
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", "secret\r")
    assert cli.main(["status", "--json"]) == 2
    said = capsys.readouterr()
    assert "CUMEM_SLEEP_SERVE_TOKEN: expected printable ASCII" in json.loads(said.out)["error"]
    assert "secret" not in said.out + said.err


@contextmanager
def another_server(code: int, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which answers once, where the front is looked for."""

    class Another(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Another) as server:
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize("asks", [["status"], ["sleep", "a"]])
@pytest.mark.parametrize("code", [200, 409])
def test_what_a_front_answers_reaches_the_terminal_as_letters(
    asks: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"running": 0, "waiting": 0, "host_bytes": 0, "level": None, "last_switch": None, "layer": ""}
    model = {"name": FORGED, "gpus": [0], "phase": FORGED, **numbers, "error": FORGED}
    answer: dict[str, Any] = {"gpus": [], "models": [model]} if asks == ["status"] else model
    if code != 200:
        answer = {"error": {"message": FORGED}}
    with another_server(code, json.dumps(answer).encode(), monkeypatch):
        assert cli.main(asks) == (0 if code == 200 else 2)
    said = "".join(capsys.readouterr())
    assert "forged" in said
    assert [line for line in said.splitlines() if line.startswith("forged") or not line.isprintable()] == []


@pytest.mark.slow
def test_what_servers_say_forges_no_line_of_the_log(tmp_path: Path) -> None:
    """Their last words, and all that is logged: the command's own handler has it."""
    words = ": {socket}; printf 'last\\033[2Jforged\\302\\233'; exit 3"
    file = write(tmp_path / "models.yaml", one={"command": ["sh", "-c", words]})
    with running(str(file), log=tmp_path / "log") as front:
        front.says(r"ends with: last.*forged")
    assert [line for line in (tmp_path / "log").read_text().splitlines() if not line.isprintable()] == []
    try:
        raise ValueError(FORGED)
    except ValueError:
        failed = sys.exc_info()
    record = logging.LogRecord("cumem_sleep.serve", logging.WARNING, "", 0, "one: %s", (FORGED,), failed)
    first, *others = tools.LogFormatter("%(asctime)s %(message)s").format(record).split("\n")
    assert re.fullmatch(r"\S+ \S+ one: it failed\\nforged\\x1b\[2J\\u202e\\x9b\\r", first)
    assert [line for line in others if not line.startswith("  ") or not line.isprintable()] == []


def test_an_empty_host_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be all addresses of the machine."""
    file = write(tmp_path / "models.yaml", small={})
    assert cli.main(["serve", str(file), "--host", ""]) == 2
    assert "--host '': expected a name or an address" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_ask_one_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "models.yaml", one={}, two={"at_start": "stopped"})
    with running(str(file), log=tmp_path / "log") as front:
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", front.url)
        assert cli.main(["sleep", "one"]) == 2
        assert "admin token is needed ($CUMEM_SLEEP_SERVE_TOKEN)" in capsys.readouterr().err
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", "another")
        assert cli.main(["sleep", "one"]) == 2
        assert "the token is wrong: it is not the admin token ($CUMEM_SLEEP_SERVE_TOKEN)" in capsys.readouterr().err
        monkeypatch.delenv("CUMEM_SLEEP_SERVE_TOKEN")
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN_FILE", str(tmp_path / "token"))
        assert cli.main(["wake", "one"]) == 0
        assert re.search(r"one +0 +awake", capsys.readouterr().out)
        assert cli.main(["sleep", "one", "--level", "2", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["command"], found["ok"], found["model"]["phase"], found["model"]["level"]) == (
            "sleep",
            True,
            "asleep",
            2,
        )
        assert cli.main(["stop", "one"]) == 0
        assert re.search(r"one +0 +stopped", capsys.readouterr().out)
        assert cli.main(["status"]) == 0
        assert re.search(r"GPU.*\n0 +unknown|GPU.*\n0 +.* of ", capsys.readouterr().out)
        assert cli.main(["status", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["simulated"], [model["name"] for model in status["models"]]) == (False, ["one", "two"])
        assert cli.main(["sleep", "three"]) == 2
        assert "there is no model 'three': there are one, two" in capsys.readouterr().err


@pytest.mark.slow
def test_the_file_is_read_again_when_it_changes_and_at_sighup(tmp_path: Path) -> None:
    file = write(tmp_path / "models.yaml", one={"at_start": "stopped"})
    with running(str(file), log=tmp_path / "log") as front:
        assert front.url
        write(file, one={"at_start": "stopped"}, two={"at_start": "stopped"})
        front.says("reload: two was added")
        file.write_text("models: 7")
        front.says(r"the configuration stays as it is: .*models.yaml:1: models: expected keys with values")
        file.write_text("models: {one: {command: x, keep: !env KEEP}}")
        front.says(
            r"the configuration stays as it is: .*models.yaml:1: not YAML: could not determine a constructor for"
        )
        front.process.send_signal(signal.SIGHUP)
        write(file, two={"at_start": "stopped"})
        front.says("reload: one is removed")


def test_the_file_is_read_again_when_a_kubelet_exchanges_its_folder(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    for number, models in (("1", ("one",)), ("2", ("one", "two"))):
        (mount / f"..{number}").mkdir(parents=True)
        write(mount / f"..{number}" / "models.yaml", **{name: {"at_start": "stopped"} for name in models})
    (mount / "..data").symlink_to("..1")
    (mount / "models.yaml").symlink_to("..data/models.yaml")
    with running(str(mount / "models.yaml"), log=tmp_path / "log") as front:
        assert front.url
        (mount / "..new").symlink_to("..2")
        (mount / "..new").rename(mount / "..data")
        shutil.rmtree(mount / "..1")
        front.says("reload: two was added")


@pytest.mark.slow
def test_the_demo_switches_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("--demo", "--port", "0", log=tmp_path / "log") as front:
        for name in ("qwen-8b", "gpt-4o-mini", "embedder"):
            speaks = "qwen-14b" if name == "gpt-4o-mini" else name
            assert f"This is {speaks}," in answer_of(front, name)
        with urllib.request.urlopen(f"{front.url}/status", timeout=60) as answer:
            status = json.load(answer)
        assert status["simulated"]
        assert {model["layer"] for model in status["models"]} == {"simulated"}
        found = re.search(r"/#token=(\S+) ", front.log.read_text())
        assert found is not None
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", found[1])
        assert cli.main(["sleep", "embedder", "--level", "3", "--url", front.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["level"] == 3
        assert cli.main(["status", "--url", front.url]) == 0
        assert "without cumem-sleep" not in capsys.readouterr().out
        children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split()
        assert len(children) == 3
    assert not [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists() and alive(pid)]


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    variables = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime)}
    front = Command("--demo", "--port", "0", log=tmp_path / "log", env=variables)
    for name in ("qwen-8b", "embedder"):  # beside the third, which sleeps
        answer_of(front, name)
    front.process.kill()
    front.process.wait()
    while list(runtime.iterdir()):
        time.sleep(0.02)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
