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

from cumem_sleep import errors
from cumem_sleep.core.levels import dropped_at_level
from cumem_sleep.settings import VARIABLES
from cumem_sleep.tools import cli
from cumem_sleep.tools.options import parser

READ_FIRST = ("README.md", "index.md")  # whose snippets every run tries, the others `pytest -m slow`
TAKES_LONG = re.compile(r"cumem-sleep (demo|bench)")
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))


def rows(page: pathlib.Path) -> list[list[str]]:
    """The cells of every row of every table."""
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])] for line in lines if set(line) - set("|- ")]


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


def test_extras_and_parts_that_are_named_exist() -> None:
    project, ci = (ROOT / "pyproject.toml").read_text(), (ROOT / ".ci" / "run").read_text()
    text = "\n".join(page.read_text() for page in PAGES)
    for extra in ",".join(re.findall(r"'\.\[([\w,]+)\]'", text)).split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    for part in " ".join(re.findall(r"bash \.ci/run ([a-z][a-z0-9 ]*)", text)).split():
        assert f"\n{part}() {{" in ci, part


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


def test_the_table_of_levels_is_what_sleep_does() -> None:
    page = ROOT / "docs" / "index.md"
    table = {row[0]: row[1:] for row in rows(page) if len(row) == 4 and row[0] in ("0", "1", "2", "3")}
    for level in (0, 1, 2, 3):
        is_dropped = dropped_at_level(level)
        assert table[str(level)] == [
            "stays" if is_dropped is None else "dropped" if is_dropped(tag) else "backed up"
            for tag in ("weights", "kv_cache", "any other")
        ]


def test_the_readme_is_short_and_leads_everywhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    first = next(snippet for snippet in snippets_of(README) if snippet.language)  # a picture has no language
    assert (first.language, len(first.text.splitlines())) == ("bash", 4), "how an idle server sleeps"
    table = text.partition("| I want … |")[2].partition("\n\n")[0].splitlines()[2:]
    assert 0 < len(table) <= 9
    assert all(line.count("](") == 1 for line in table), "one link each"


def test_errors_and_exit_codes_are_those_of_the_code() -> None:
    table = rows(ROOT / "docs" / "errors.md")
    bases = {row[0].strip("`"): {*re.findall(r"\w+", row[1])} for row in table if len(row) == 4}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    for kind in kinds:
        if issubclass(kind, errors.CumemSleepError) and kind is not errors.CumemSleepError:
            assert bases[kind.__name__] == {base.__name__ for base in kind.__bases__} - {"CumemSleepError"}
    limits = {limit for row in table if len(row) == 2 for limit in re.findall(r"`(\w+)`", row[0])}
    assert limits >= errors.OutOfHostMemory.ADVICE.keys()
    codes = {int(row[0]) for row in table if row[0].isdecimal()}
    assert codes == {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
