"""`cumem-sleep serve` as a process, and the commands that ask it."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
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

from cumem_sleep.tools import cli
from cumem_sleep.tools import serve as tools

TOKEN = "secret"


def write(file: Path, port: int = 0, **models: dict[str, Any]) -> Path:
    whole = {name: {"command": command(name), "idle": "never", **model} for name, model in models.items()}
    front = {"port": port, "admin_token": TOKEN}
    text = json.dumps({"front": front, "logs": str(file.parent / "logs"), "models": whole})
    file.with_suffix(".new").write_text(text)
    os.replace(file.with_suffix(".new"), file)
    return file


class Command:
    """One that runs; `log` is what it has said."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            started = [sys.executable, "-m", "cumem_sleep", "serve", *arguments]
            self.process = subprocess.Popen(started, stdout=file, stderr=file)

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


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[Command]:
    started = Command(*arguments, log=log)
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
    assert f"{file}:1: models.one.comand: 'x': unknown key: did you mean command?" in capsys.readouterr().err
    file.write_text("models:\n  one: {command: vllm serve m, gpus: [-1]}\n  two: {command: vllm serve m, keep: long}\n")
    assert cli.main(["serve", str(file), "--check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].split(": ")[:2] for line in lines] == [
        [f"{file}:2", "models.one.gpus"],
        [f"{file}:3", "models.two.keep"],
    ]


@pytest.mark.parametrize("arguments", [[], ["models.yaml", "--demo"], ["--check"], ["/nonexistent.yaml"]])
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert capsys.readouterr().err.startswith("cumem-sleep")


def test_logs_that_cannot_be_written_end_it_before_it_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "models.yaml", small={})
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert cli.main(["serve", str(file)]) == 2
    assert re.search(r"logs: nothing can be written to \S+/logs \(.+\): name another folder", capsys.readouterr().err)


def test_nobody_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", "http://127.0.0.1:1")
    assert cli.main(["status"]) == 2
    assert "no `cumem-sleep serve` answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert cli.main(["wake", "m", "--url", "nonsense"]) == 2
    assert "'nonsense': expected a URL such as" in capsys.readouterr().err
    for url in ("http://[::1", "http://127.0.0.1:99999"):
        assert cli.main(["wake", "m", "--url", url]) == 2
        assert "expected a URL such as" in capsys.readouterr().err
    monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", "secret\r")
    assert cli.main(["status", "--json"]) == 2
    said = capsys.readouterr()
    assert "$CUMEM_SLEEP_SERVE_TOKEN: expected printable ASCII" in json.loads(said.out)["error"]
    assert "secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("code", "answer"), [(404, b'{"detail": "Not Found"}'), (200, b"[]"), (200, b"{}"), (500, b'"x"')]
)
def test_another_server_answers(
    code: int, answer: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Another) as server:
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert cli.main(["status", "--json"]) == 2
        thread.join()
    assert "is no `cumem-sleep serve`" in json.loads(capsys.readouterr().out)["error"]


def test_an_empty_host_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be all addresses of the machine."""
    file = write(tmp_path / "models.yaml", small={})
    assert cli.main(["serve", str(file), "--host", ""]) == 2
    assert "--host '': expected a name or an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "error", "says"),
    [("", None, "without cumem-sleep in it"), ("", "it died", "it died"), (None, None, ""), ("0.1.0", None, "")],
)
def test_the_table_says_which_server_is_without_the_layer(layer: str | None, error: str | None, says: str) -> None:
    numbers = {"running": 0, "waiting": 0, "host_bytes": 0, "level": None, "last_switch": None}
    model = {"name": "one", "gpus": [0], "phase": "awake", **numbers, "layer": layer, "error": error}
    assert list(tools.models_table([model]).columns[-1].cells) == [says]


@pytest.mark.slow
def test_the_commands_ask_one_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "models.yaml", one={}, two={"at_start": "stopped"})
    with running(str(file), log=tmp_path / "log") as front:
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_URL", front.url)
        assert cli.main(["sleep", "one"]) == 2
        assert "admin token is needed ($CUMEM_SLEEP_SERVE_TOKEN)" in capsys.readouterr().err
        monkeypatch.setenv("CUMEM_SLEEP_SERVE_TOKEN", TOKEN)
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
        front.says(r"the configuration stays as it is: .*models.yaml:1: models: '7': expected keys with values")
        file.write_text("models: {one: {command: x, keep: !env KEEP}}")
        front.says(
            r"the configuration stays as it is: .*models.yaml:1: models.one.keep: 'KEEP': expected a plain value"
        )
        front.process.send_signal(signal.SIGHUP)
        write(file, two={"at_start": "stopped"})
        front.says("reload: one is removed")


@pytest.mark.slow
def test_a_reload_says_nothing_of_the_options_of_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path / "models.yaml", port=1, one={"at_start": "stopped"})
    with running(str(file), "--host", "127.0.0.1", "--port", "0", log=tmp_path / "log") as front:
        assert front.url != "http://127.0.0.1:1"
        front.process.send_signal(signal.SIGHUP)
        assert front.says("reload: (.*)")[1] == "nothing in the configuration has changed"


@pytest.mark.slow
def test_the_demo_switches_and_leaves_nothing(tmp_path: Path) -> None:
    with running("--demo", "--port", "0", log=tmp_path / "log") as front:
        for name in ("qwen-8b", "gpt-4o-mini", "embedder"):
            body = json.dumps({"model": name, "messages": [{"role": "user", "content": "?"}]}).encode()
            with urllib.request.urlopen(f"{front.url}/v1/chat/completions", body, timeout=60) as answer:
                speaks = "qwen-14b" if name == "gpt-4o-mini" else name
                assert f"This is {speaks}," in json.load(answer)["choices"][0]["message"]["content"]
        with urllib.request.urlopen(f"{front.url}/status", timeout=60) as answer:
            assert json.load(answer)["simulated"]
        children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split()
        assert len(children) == 3
    assert not [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists() and alive(pid)]


@pytest.mark.slow
def test_servers_end_with_a_front_that_is_killed(tmp_path: Path) -> None:
    file = write(tmp_path / "models.yaml", one={})
    front = Command(str(file), log=tmp_path / "log")
    front.says("one: sleep in")
    children = Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split()
    assert len(children) == 1
    front.process.kill()
    front.process.wait()
    while alive(children[0]):
        time.sleep(0.02)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
