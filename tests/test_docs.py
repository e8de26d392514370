"""The documentation: its snippets run, and what it names exists. README, CONTRIBUTING and the pages of docs/."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest
from snippets import (
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
from test_variables import of_contributors

from cumem_sleep.settings import VARIABLES
from cumem_sleep.tools.options import parser

READ_FIRST = ("README.md", "index.md")  # whose snippets every run tries, the others `pytest -m slow`
TAKES_LONG = re.compile(r"cumem-sleep (demo|bench)")
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))


def in_a_fast_run(snippet: Snippet) -> bool:
    return snippet.page.name in READ_FIRST and not TAKES_LONG.search(snippet.text)


@pytest.mark.parametrize(
    "snippet",
    [pytest.param(each, marks=[] if in_a_fast_run(each) else [pytest.mark.slow]) for each in THAT_RUN],
    ids=str,
)
def test_snippets_run(snippet: Snippet, tmp_path: pathlib.Path) -> None:
    skip_unless_it_can_run(snippet)
    (run_python if snippet.language == "python" else run_bash)(snippet, tmp_path)


def test_others_that_are_said_to_run_a_snippet_do() -> None:
    for snippet in SNIPPETS:
        if snippet.run_by is not None:
            file = (ROOT / snippet.run_by.partition(",")[0]).read_text()
            parts = re.findall(r'snippet_at\("(\w+)", "([^"]+)"\)', file)
            lines = [f'"{line}"' for line in snippet.text.splitlines()]
            assert all(line in file for line in lines) or snippet in [snippet_at(*part) for part in parts], snippet


@EACH_PAGE
def test_commands_are_those_of_the_parser(page: pathlib.Path) -> None:
    """Every `cumem-sleep …` in a shell snippet or in a paragraph's code."""
    code = [snippet.text for snippet in snippets_of(page) if snippet.language == "bash"]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    code += [found for found in re.findall(r"`([^`\n]+)`", prose) if found.startswith("cumem-sleep ")]
    for found in re.finditer(r"(?<![-\w./])cumem-sleep((?: [^`;&|>\n#]+)?)", "\n".join(code)):
        arguments = shlex.split(found[1])
        if arguments and arguments not in (["--help"], ["--version"]):
            assert parser("").parse_args(arguments).command, arguments


@EACH_PAGE
def test_files_variables_and_results_that_are_named_exist(page: pathlib.Path) -> None:
    text = page.read_text()
    files = re.findall(
        r"(?<![\w/.])((?:benchmarks|tests|csrc|cumem_sleep|docs|examples|tools|\.ci|\.github)/[\w./-]*)", text
    )
    assert [name for name in files if not (ROOT / name.rstrip(".")).exists()] == []
    assert {*re.findall(r"CUMEM_SLEEP_[A-Z][A-Z_]*[A-Z]\b", text)} <= VARIABLES.keys() | of_contributors()
    if page.parent.name != "decisions":  # whose index says at which commit removed ones are
        results = re.findall(r"`([a-z0-9_]+\.(?:json|txt))`(?!\s+at\s+commit)", text)
        known = {path.name for path in (*ROOT.glob("benchmarks/results/*"), *ROOT.glob("benchmarks/*"))}
        assert {*results} - known - {"requirements.txt"} == set()


def anchors(page: pathlib.Path) -> set[str]:
    """Of its headings, as GitHub and MyST make them; those of a file that it includes are its own."""
    text = page.read_text()
    if included := re.match(r"```\{include\} (\S+)", text):
        text = (page.parent / included[1]).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_links_between_pages_resolve(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
