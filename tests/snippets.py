"""The fenced blocks of README, CONTRIBUTING and docs/, and the shell that runs those of bash.

In that shell only a few programs are found. `cumem-sleep` and `python` are this very package's, `vllm` and `pip` are
stand-ins (`documented_programs.py`), and `curl` fails if it is refused. Free ports take the place of documented ones.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support import two_free_ports

import cumem_sleep

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *ROOT.glob("docs/**/*.md"),
]
PAGES += [ROOT / "examples" / "README.md", ROOT / "examples" / "deploy" / "README.md"]

SHELL_OPTIONS = ["-e", "-u", "-o", "pipefail", "-c"]
TOOLS = ("cp", "grep", "mkdir", "openssl", "sleep")  # of the system, for setups and for waiting
# What setups are made of: a server beside the snippet, or a short life for one that the snippet starts.
PRELUDE = """
answers() { until curl "localhost:$1/health" >health 2>&1; do kill -0 $!; sleep 0.05; done; }  # or the server has ended
beside() { local port=$1; shift; "$@" >server.log 2>&1 & trap 'kill $(jobs -p)' EXIT; answers "$port"; }
for_a_while() { local port=$1; shift; "$@" & answers "$port"; kill $!; wait $!; }
"""


@dataclass(frozen=True)
class Snippet:
    """One fenced block, and what the comments above it say.

    Attributes:
        not_run: why it is not run.
        run_by: what runs it in place of `tests/test_docs.py`: a file first.
        setup, after: what to run before it, and after it.
        file: the name under which the page's other snippets find it.
    """

    page: pathlib.Path
    line: int
    language: str
    text: str
    not_run: str | None
    run_by: str | None
    setup: str
    after: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets_of(page: pathlib.Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"```(\S*)", lines[number])
        if fence is None:
            number += 1
            continue
        end = lines.index("```", number + 1)
        said: dict[str, list[str]] = {}
        for above in reversed(lines[:number]):
            comment = re.fullmatch(r"<!-- (not run|run by|setup|after|file): (.+) -->", above)
            if comment is None and above:
                break
            if comment is not None:
                said.setdefault(comment[1], []).insert(0, comment[2])
        setup, after = ("".join(f"{line}\n" for line in said.get(kind, ())) for kind in ("setup", "after"))
        not_run, run_by, file = (said.get(kind, [None])[0] for kind in ("not run", "run by", "file"))
        text = "\n".join(lines[number + 1 : end]) + "\n"
        yield Snippet(page, number + 1, fence[1], text, not_run, run_by, setup, after, file)
        number = end + 1


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
THAT_RUN = [s for s in SNIPPETS if s.language in ("python", "bash") and s.not_run is None and s.run_by is None]


def snippet_at(page: str, part: str) -> Snippet:
    """The only one of a page of docs/ that has this in it."""
    (found,) = (each for each in SNIPPETS if each.page.name == f"{page}.md" and part in each.text)
    return found


def run_python(snippet: Snippet, folder: pathlib.Path) -> None:
    _run([sys.executable, "-c", snippet.setup + snippet.text + snippet.after], _environment(), folder)


def run_bash(snippet: Snippet, folder: pathlib.Path) -> None:
    free = {number: str(two_free_ports()) for number in ("8000", "8001", "8002")}

    def on_free_ports(text: str) -> str:
        return re.sub(r"\b800[012]\b", lambda found: free[found[0]], text)

    for each in snippets_of(snippet.page):
        if each.file is not None:
            (folder / each.file).write_text(on_free_ports(each.text))
    programs = folder / "bin"
    _write_programs(programs)
    script = on_free_ports(PRELUDE + snippet.setup + snippet.text + snippet.after)
    bash = shutil.which("bash")
    assert bash is not None
    _run([bash, *SHELL_OPTIONS, script], {**_environment(), "PATH": str(programs)}, folder)


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("CUMEM_SLEEP_")}
    package = os.pathsep.join([str(pathlib.Path(cumem_sleep.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    return {**variables, "CUMEM_SLEEP_DRIVER": "sim", "PYTHONPATH": package, "CHECKOUT": str(ROOT)}


def _write_programs(folder: pathlib.Path) -> None:
    folder.mkdir()
    python, path = shlex.quote(sys.executable), shlex.quote(f"{folder}{os.pathsep}{os.environ['PATH']}")
    ours = f"{python} {shlex.quote(str(ROOT / 'tests' / 'documented_programs.py'))}"
    commands = {"python": python, "cumem-sleep": f"{python} -m cumem_sleep"}
    commands |= {name: f"{ours} {name}" for name in ("vllm", "pip")}
    if curl := shutil.which("curl"):
        # Started with a sanitizer that it was not built with, it hangs.
        commands["curl"] = f"env -u LD_PRELOAD {curl} --fail --silent --show-error"
    for name, command in commands.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexport PATH={path}\nexec {command} "$@"\n')
        program.chmod(0o755)
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or f"/no/{name}")


def _run(command: list[str], environment: dict[str, str], folder: pathlib.Path) -> None:
    """To its end, and that of what it has started."""
    with (folder / "said").open("w+") as said:  # not a pipe, which a server that is left would keep open
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    log = folder / "server.log"
    assert code == 0, (folder / "said").read_text() + (log.read_text() if log.exists() else "")


def skip_unless_it_can_run(snippet: Snippet) -> None:
    """Skip, where packages are missing that the package itself can do without."""
    whole = snippet.setup + snippet.text
    if "cumem-sleep serve" in whole or "vllm" in whole:
        for module in ("yaml", "uvicorn"):
            pytest.importorskip(module, reason="needs the packages of serve: pip install '.[serve]'")
    if "torch" in whole and snippet.language == "python" and "import torch" in whole:
        pytest.importorskip("torch")
    for tool, words in (("curl", "curl|beside|for_a_while"), ("openssl", "openssl")):
        if re.search(rf"\b({words})\b", whole) and shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
