"""The documentation: its snippets run, and what it names exists. README, CONTRIBUTING and the pages of docs/."""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from snippets import (
    OF_BASH,
    OF_PYTHON,
    PAGES,
    README,
    ROOT,
    SNIPPETS,
    THAT_RUN,
    Snippet,
    run_bash,
    run_python,
    skip_unless_it_can_run,
    snippet_at,
    snippets_of,
)

from cumem_sleep import CuMemAllocator, Settings, SleepReport, WakeReport, errors
from cumem_sleep.core.levels import dropped_at_level
from cumem_sleep.settings import VARIABLES, GateSettings
from cumem_sleep.tools import cli
from cumem_sleep.vllm import SleepGate, metrics, plugin


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines if set(line) - set("|- ")]


# Snippets


def test_snippets_are_found() -> None:
    languages = Counter(snippet.language for snippet in SNIPPETS)
    assert languages.keys() <= {
        "python",
        "bash",
        "text",
        "toml",
        "yaml",
        "",
        "{eval-rst}",
        "{toctree}",
        "{include}",
        "{literalinclude}",
    }
    assert len(THAT_RUN) >= 20


READ_FIRST = ("README.md", "index.md")  # whose snippets every run tries, the others `pytest -m slow`
TAKES_LONG = re.compile(r"cumem-sleep (demo|bench)")


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(
            snippet,
            marks=[] if snippet.page.name in READ_FIRST and not TAKES_LONG.search(snippet.text) else [pytest.mark.slow],
        )
        for snippet in THAT_RUN
    ],
    ids=str,
)
def test_snippets_run(snippet: Snippet, tmp_path: pathlib.Path) -> None:
    skip_unless_it_can_run(snippet)
    (run_python if snippet.language == "python" else run_bash)(snippet, tmp_path)


def called(text: str) -> set[str]:
    """The commands of a shell snippet, less the functions that it defines."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "text", re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE))
    before = r"(?:^|[;&|{]|\b(?:do|until)\b)\s*(?:until +)?(?:[A-Z_]+=\S+ +)*"
    return set(re.findall(before + r"([^\s;&|(){}]+)", text, re.MULTILINE)) - set(re.findall(r"(\w+)\(\)", text))


@pytest.mark.parametrize("snippet", [s for s in THAT_RUN if s.language == "bash"], ids=str)
def test_only_our_own_commands_are_run(snippet: Snippet) -> None:
    """A test that installs packages or asks other machines would be a surprise."""
    # `admin` is a function of vllm.md's first snippet, which sets up the others.
    of_the_shell = {"export", "kill", "sleep", "return", "do", "done"}
    assert called(snippet.text) <= {"cumem-sleep", "vllm", "pip", "curl", "python", "admin"} | of_the_shell
    for arguments in re.findall(r"\bcurl ([^;&|\n]+)", snippet.text):
        assert re.findall(r"\b(\S+):(?:\d+|\$\w)/", arguments) == ["localhost"], arguments


@pytest.mark.parametrize("line", ["pip install requests", "pip install '.[vllm]'", "docker ps", "vllm serve m", "gcc"])
def test_other_programs_are_not_found(line: str, tmp_path: pathlib.Path) -> None:
    snippet = Snippet(README, 0, "bash", f"{line}\n", None, None, "", "", None)
    with pytest.raises(AssertionError, match=r"there are cumem-sleep and|not found|required: --enable-sleep-mode"):
        run_bash(snippet, tmp_path)


@pytest.mark.parametrize("snippet", [s for s in OF_PYTHON if s not in THAT_RUN], ids=str)
def test_other_python_is_at_least_valid(snippet: Snippet) -> None:
    ast.parse(snippet.text)


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.run_by is not None], ids=str)
def test_others_that_are_said_to_run_a_snippet_do(snippet: Snippet) -> None:
    assert snippet.run_by is not None
    file = (ROOT / snippet.run_by.partition(",")[0]).read_text()
    if snippet.run_by.startswith(".ci/"):
        assert all(f'"{line}"' in file for line in snippet.text.splitlines())
    else:
        parts = re.findall(r'snippet_at\("(\w+)", "([^"]+)"\)', file)
        assert any(snippet_at(*part) == snippet for part in parts)


# What is not run is looked at, as far as that shows something


class TakenApart(Exception):
    """A program has got through its arguments."""


LINES = [line for each in OF_BASH for line in each.text.splitlines()]
OF_BENCHMARKS = [line for line in LINES if line.startswith("python benchmarks/") and "result_tables" not in line]


@pytest.mark.parametrize("line", OF_BENCHMARKS, ids=lambda line: line.split()[1].partition("/")[2])
def test_benchmarks_take_their_arguments(
    line: str, benchmark_module: Callable[[str], types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise TakenApart

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    code, _, comment = line.partition("#")
    more = re.match(r" (--\w+ \S+) for ", comment)
    _, program, *arguments = shlex.split(f"{code} {more[1] if more else ''}")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    module = benchmark_module(pathlib.Path(program).stem)
    with pytest.raises(TakenApart):
        module.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [each for each in LINES if re.match(r"pytest (tests|benchmarks)/", each)],
    ids=lambda line: line.partition("#")[0].rstrip(),
)
def test_pytest_finds_tests(line: str, tmp_path: pathlib.Path) -> None:
    """Some, where the docs say so; running them is the work of this very suite, or of a GPU."""
    code, _, comment = line.partition("#")
    more = re.match(r" (--\w+ \d+) for ", comment)
    code = re.sub(r"(?<=json=)", f"{tmp_path}/", re.sub(r"(?=(?:tests|benchmarks)/)", f"{ROOT}/", code))
    arguments = shlex.split(code) + (more[1].split() if more else [])
    process = subprocess.run(
        [sys.executable, "-P", "-m", *arguments, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr


def test_huge_pages_are_switched_on_as_the_doctor_says() -> None:
    (line,) = (line for line in LINES if "shmem_enabled" in line)
    assert f'"{line}"' in (ROOT / "cumem_sleep" / "tools" / "doctor" / "host.py").read_text()


def test_containers_share_the_folder_of_the_socket_and_one_user() -> None:
    (snippet,) = (each for each in OF_BASH if "--socket" in each.text and "docker" in each.text)
    volume, owner, vault, client = snippet.text.splitlines()
    name = volume.split()[-1]
    mount = f"-v {name}:/vault "
    assert all(mount in line for line in (owner, vault, client))
    sockets = re.findall(r"(?:--socket |CUMEM_SLEEP_VAULT=)(\S+)", snippet.text)
    assert sockets == ["/vault/vault.sock"] * 2
    assert re.findall(r"(?:chown|--user) (\S+)", snippet.text) == ["1000"] * 3


def commands(text: str) -> Iterator[list[str]]:
    """Every `cumem-sleep …` in a shell snippet or in a paragraph's code, as its arguments."""
    for found in re.finditer(r"(?<![-\w./])cumem-sleep((?: [^`;&|>\n#]+)?)", text):
        yield shlex.split(found[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))
def test_commands_are_those_of_the_parser(page: pathlib.Path) -> None:
    code = [snippet.text for snippet in snippets_of(page) if snippet.language == "bash"]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    code += [found for found in re.findall(r"`([^`\n]+)`", prose) if found.startswith("cumem-sleep ")]
    for text in code:
        for arguments in commands(text):
            if arguments and arguments not in (["--help"], ["--version"]):
                options = cli._parser().parse_args(arguments)
                assert options.run is not None, arguments


def test_options_in_the_prose_exist() -> None:
    known = set()
    parser = cli._parser()
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for each in (parser, *subparsers.choices.values()):
        known |= set(each._option_string_actions)
    for option in re.findall(r"`(--[\w-]+)", page("index")):
        assert option in known


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))
def test_files_that_are_named_exist(page: pathlib.Path) -> None:
    named = re.findall(
        r"(?<![\w/.])((?:benchmarks|tests|csrc|cumem_sleep|docs|examples|tools|\.ci|\.github)/[\w./-]*)",
        page.read_text(),
    )
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def test_extras_and_parts_that_are_named_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    ci = (ROOT / ".ci" / "run").read_text() if (ROOT / ".ci" / "run").exists() else ""
    text = "\n".join(page.read_text() for page in PAGES)
    for named in re.findall(r"'\.\[([\w,]+)\]'", text):
        for extra in named.split(","):
            assert re.search(rf"^{extra} = \[", extras, re.MULTILINE), extra
    for named in re.findall(r"bash \.ci/run ([a-z][a-z0-9 ]*)", text):
        for part in named.split():
            assert f"\n{part}() {{" in ci, part
    named = {row[0].strip("`") for row in rows((ROOT / "CONTRIBUTING.md").read_text())} - {"part", "variable"}
    parts = {name for name in named if not name.startswith("CUMEM_SLEEP_")}
    assert parts == set(re.search(r"^parts=\(([\w ]+)\)", ci, re.MULTILINE)[1].split())  # type: ignore[index]


# Links


def anchors(page: pathlib.Path) -> set[str]:
    """Of its headings, as GitHub and MyST make them; those of a file that it includes are its own."""
    text = page.read_text()
    if included := re.match(r"```\{include\} (\S+)", text):
        text = (page.parent / included[1]).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))
def test_links_between_pages_resolve(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            assert target.startswith("https://")
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_example_is_in_the_site() -> None:
    assert set(re.findall(r"literalinclude\} \.\./examples/(\S+)", page("examples"))) == {
        path.name for path in ROOT.glob("examples/*.py")
    }


def test_every_page_is_in_the_site() -> None:
    docs = ROOT / "docs"
    named = {docs / "index.md"}
    for tree in (snippet for snippet in SNIPPETS if snippet.language == "{toctree}"):
        for line in tree.text.splitlines():
            if line and not line.startswith(":") and line != "self":
                named |= {*tree.page.parent.glob(re.sub(r".*<(.*)>", r"\1", line) + ".md")}
    assert named == {*docs.rglob("*.md")}


def test_every_decision_is_in_their_index() -> None:
    folder = ROOT / "docs" / "decisions"
    links = re.findall(r"^- \[(.+)\]\((.+)\)$", (folder / "index.md").read_text(), re.MULTILINE)
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("*.md") if path.stem != "index"}
    assert {name: f"# {title}" for title, name in links} == titles
    assert len(links) == len(titles)


def test_decisions_stay_short() -> None:
    words = {path.stem: len(path.read_text().split()) for path in ROOT.glob("docs/decisions/*.md")}
    assert {name for name, count in words.items() if count > 200} <= {"index", "given-up"}  # these are lists


def test_the_readme_stays_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


# Where things are


def defined_in(tree: ast.Module) -> set[str]:
    """What a module defines: classes, functions and variables, and those of its classes, as `Class.name`."""
    found = set()
    for node, prefix in [(node, "") for node in tree.body]:
        names = names_of(node)
        found |= {prefix + name for name in names}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in names_of(inner)}
    return found


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def missing_in(file: pathlib.Path, names: list[str]) -> list[str]:
    """Those that a source file does not define. Of C++ each word of a name has to occur in it."""
    text = file.read_text()
    if file.suffix == ".py":
        return sorted(set(names) - defined_in(ast.parse(text)))
    return [name for name in names if not all(re.search(rf"\b{word}\b", text) for word in name.split("::"))]


def test_places_in_the_code_exist() -> None:
    """A rename in the code fails here, unless the tables of how it works follow."""
    tables = page("how-it-works").partition("Where to look")[2]
    places = re.findall(r"`([\w./-]+\.(?:py|cpp|h))(?:: ([^`]+))?`", tables)
    assert len([names for _, names in places if names]) > 50
    for path, names in places:
        file = next((file for file in (ROOT / "cumem_sleep" / path, ROOT / path) if file.exists()), None)
        assert file is not None, path
        assert not missing_in(file, names.split(", ") if names else []), path


def test_every_module_is_in_the_tables() -> None:
    tables = page("how-it-works").partition("## Where things are")[2].partition("Where to look")[0]
    named = {word for code in re.findall(r"`([^`]+)`", tables) for word in re.split(r"[/ ]", code)}
    sources = [*ROOT.glob("cumem_sleep/**/*.py"), *ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/*.h")]
    places = [path.relative_to(ROOT / path.relative_to(ROOT).parts[0]) for path in sources]
    # Folders that the tables name as one.
    modules = {place.stem for place in places if not {"shim", "bench", "demo", "doctor"} & {*place.parts[:-1]}}
    assert sorted(modules - named - {"__init__", "__main__"}) == []


# Settings


def simulator_variables() -> dict[str, str]:
    """With their defaults, from the source of the simulated driver."""
    source = (ROOT / "csrc" / "sim" / "simulation.cpp").read_text()
    return dict(re.findall(r'number\("(CUMEM_SLEEP_SIM_\w+)",\s*([\w.]+),', source))


def test_defaults_are_those_of_the_code() -> None:
    """Of settings they are in the table that the page is made from."""
    suite = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    of_suite = dict(re.findall(r'"(CUMEM_SLEEP_TEST_\w+)", "(\w+)"\)', suite))
    of_simulator = {**simulator_variables(), "CUMEM_SLEEP_SIM_DEVICE_BYTES": str(1 << 30)}
    for variable, default in {**of_suite, **of_simulator}.items():
        assert VARIABLES[variable].default == f"`{default}`"
    assert Settings.from_environment({"CUMEM_SLEEP_PREPARE_BYTES_PER_SECOND": "5GB"}) == Settings()
    gate = {"CUMEM_SLEEP_REQUEST_DEADLINE_S": "60", "CUMEM_SLEEP_MAX_HELD_BYTES": "256MiB"}
    assert GateSettings.from_environment(gate) == GateSettings()


def test_choices_are_those_of_the_code() -> None:
    for row in rows(page("settings")):
        variable = row[0].strip("`")
        settings: type[Settings] | type[GateSettings]
        for settings in (Settings, GateSettings):
            named = {each.name: each.default for each in fields(settings)}
            name = variable.removeprefix("CUMEM_SLEEP_").lower()
            if isinstance(named.get(name), str):
                choices = re.findall(r"`(\w+)`:", row[2])
                assert choices
                for choice in choices:
                    settings.from_environment({variable: choice})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))
def test_variables_that_are_named_exist(page: pathlib.Path) -> None:
    named = set(re.findall(r"CUMEM_SLEEP_[A-Z][A-Z_]*", page.read_text()))
    of_tests = {
        found
        for path in ROOT.glob("tests/**/*.py")
        for found in re.findall(r"CUMEM_SLEEP_(?:TEST|GATE)_\w+", path.read_text())
    }
    assert named - {"CUMEM_SLEEP_"} <= VARIABLES.keys() | of_tests


# What the code logs


def test_the_line_that_says_the_layer_is_active(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        allocator = CuMemAllocator(Settings())
        object.__setattr__(allocator.settings, "driver", os.environ["CUMEM_SLEEP_DRIVER"])
        allocator.get_current_usage()
        allocator._operations.open()
    allocator.close()
    said = [record.getMessage() for record in caplog.records if "memory pools" in record.getMessage()]
    driver = os.environ["CUMEM_SLEEP_DRIVER"]
    expected = "the defaults" if driver == "cuda" else f"driver={driver!r}"
    assert [line.replace(expected, "the defaults") for line in said] == [
        line for line in page("vllm").splitlines() if line.startswith("cumem-sleep: memory pools")
    ]


def test_the_line_of_the_gate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(metrics, "register", lambda *_: True)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        SleepGate(lambda *_: None)  # type: ignore[arg-type,return-value]
    assert caplog.messages == [line for line in page("vllm").splitlines() if line.startswith("cumem-sleep gate: ")]


def test_the_line_of_a_vllm_that_is_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin.compatibility, "is_cuda", lambda: True)
    monkeypatch.setattr(plugin.compatibility, "misfit", lambda **_: "…")
    monkeypatch.setattr(plugin.compatibility, "installed_version_misfit", lambda: None)
    monkeypatch.setattr(plugin, "_log_as_vllm_does", lambda: None)
    monkeypatch.setenv(plugin._SAID, "")
    monkeypatch.delenv(plugin._SAID)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        plugin.register()
    (line,) = (line for line in page("vllm").splitlines() if line.startswith("cumem-sleep does not serve this vLLM, "))
    assert caplog.messages == [line]


def test_lines_of_sleeps_and_wakes_are_measured_ones_and_as_the_code_writes_them() -> None:
    scenarios = json.loads((ROOT / "benchmarks" / "results" / "vllm_scenarios.json").read_text())["scenarios"]
    logged = {line for outcome in scenarios.values() for line in outcome.get("log of the layer", ())}
    quoted = [line for line in page("vllm").splitlines() if re.match(r"cumem-sleep: (sleep|wake): ", line)]
    assert len(quoted) == 2
    assert set(quoted) <= logged
    phases = dict.fromkeys(("quiesce", "host_memory", "digest", "copy", "check", "release"), 0.0)
    reports = (
        SleepReport(freed_bytes=1 << 30, copied_bytes=1 << 20, left_bytes=1 << 30, phases=phases),
        WakeReport(restored_bytes=1 << 30, phases=dict.fromkeys(("copy", "map", "verify"), 0.0)),
    )

    def shape(line: str) -> str:
        return re.sub(r"\d+(\.\d+)?( [KMG]?i?B\b(?!/))?", "N", line)

    assert [shape(line) for line in quoted] == [shape(f"cumem-sleep: {report}") for report in reports]


# Levels and errors


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "index.md"], ids=lambda path: str(path.name))
def test_the_table_of_levels_is_what_sleep_does(path: pathlib.Path) -> None:
    table = {row[0]: row[1:] for row in rows(path.read_text()) if len(row) == 4 and row[0] in ("0", "1", "2", "3")}
    for level in (0, 1, 2, 3):
        is_dropped = dropped_at_level(level)
        expected = [
            "stays" if is_dropped is None else "dropped" if is_dropped(tag) else "backed up"
            for tag in ("weights", "kv_cache", "any other")
        ]
        assert table[str(level)] == expected


def test_every_error_is_on_the_page_with_its_bases() -> None:
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.CumemSleepError) and kind is not errors.CumemSleepError
    }
    on_the_page = {
        row[0].strip("`"): set(re.findall(r"\w+", row[1]))
        for row in rows(page("errors"))
        if len(row) == 4 and row[0].strip("`") in kinds
    }
    assert on_the_page == {
        name: {base.__name__ for base in kind.__bases__} - {"CumemSleepError"} for name, kind in kinds.items()
    }
    limits = {limit for row in rows(page("errors")) if len(row) == 2 for limit in re.findall(r"`(\w+)`", row[0])}
    assert limits >= errors.OutOfHostMemory.ADVICE.keys()


def test_exit_codes_are_those_of_the_command() -> None:
    codes = {int(row[0]) for row in rows(page("errors")) if row[0].isdecimal()}
    assert codes == {value for name, value in vars(cli).items() if name.startswith("EXIT_")}


def test_results_that_are_cited_are_there() -> None:
    """Raw results, named in backticks by the docs and by comments; a page that names a removed one names its commit."""
    results = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    removed = set()
    for commit in ("5735fe0", "8d3b3c0"):
        command = ["git", "ls-tree", "--name-only", f"{commit}:benchmarks/results"]
        git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if git.returncode != 0:
            pytest.skip(f"{git.stderr.strip()}: a source distribution or a shallow clone")
        removed |= {*git.stdout.split()}
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    sources = [*(ROOT / "cumem_sleep").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    cited, lacking = set(), []
    for path in (*pages, *sources):
        text = path.read_text("utf-8")
        needs_commit = path in pages and "decisions" not in str(path.relative_to(ROOT))
        for match in re.finditer(r"`([a-z0-9_]+\.(?:json|txt))`( at commit (?:5735fe0|8d3b3c0))?", text):
            cited.add(match[1])
            if match[1] not in results and not (match[1] in removed and (match[2] or not needs_commit)):
                lacking.append(f"{path.name}: {match[1]}")
    assert len(cited) > 30
    assert not lacking


def test_api_pages_take_no_part_of_a_sentence_for_a_type() -> None:
    """Sphinx would print what is before a colon as the type of a property, or of what is returned."""
    docstring = pytest.importorskip("sphinx.ext.napoleon.docstring")
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    with pytest.MonkeyPatch.context() as patch:
        for method in ("_consume_inline_attribute", "_consume_returns_section"):
            patch.setattr(docstring.GoogleDocstring, method, getattr(docstring.GoogleDocstring, method))
        runpy.run_path(str(ROOT / "docs" / "conf.py"))

        def lines(text: str, what: str) -> list[str]:
            found = docstring.GoogleDocstring(text, napoleon.Config(), what=what, name="x").lines()
            return [line.strip() for line in found if line.strip()]

        assert lines("The checkpoint: what it freed.\n\nNone before it.", "property") == [
            "The checkpoint: what it freed.",
            "None before it.",
        ]
        assert lines("Text.\n\nRaises:\n    ValueError: it is bad.", "property") == [
            "Text.",
            ":raises ValueError: it is bad.",
        ]
        assert lines("Text.\n\nReturns:\n    By phase: seconds.", "method") == ["Text.", ":returns: By phase: seconds."]
