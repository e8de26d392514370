"""What surrounds the code: versions that are said twice, workflows, and what a release rewrites."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import cumem_sleep
from cumem_sleep.vllm import compatibility

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def test_the_version_is_said_once() -> None:
    assert f'\nversion = "{cumem_sleep.__version__}"\n' in PROJECT


def test_the_vllm_versions_are_the_same_everywhere() -> None:
    (tested,) = re.findall(r"versions=\(([\d. ]+)\)", CI)
    said = [
        re.findall(rf"{words}([^;]+ and [\d.]+\d)", text)[0].replace(" (by hand)", "")  # and not in CI
        for words, text in (
            ("Tested without a GPU: ", (ROOT / "docs" / "vllm.md").read_text()),
            ("Tested: ", compatibility.__doc__ or ""),
        )
    ]
    assert said[0] == said[1]
    assert {*tested.split()} <= {*re.split(", | and ", said[0])}
    # The oldest and the newest one that the plugin serves, so both ends are tested.
    ends = [f"{major}.{minor}" for major, minor in (compatibility.OLDEST, compatibility.NEWEST)]
    assert [version.rpartition(".")[0] for version in (tested.split()[0], tested.split()[-1])] == ends
    for name in ("README.md", "CHANGELOG.md", "docs/vllm.md"):
        served = re.findall(
            r"(?:vLLM |vLLM \| |every version from )(\d\.\d+) to (\d\.\d+)\b", (ROOT / name).read_text()
        )
        assert {*served} == {tuple(ends)}, name


def test_the_public_ci_runs_every_part_on_every_python() -> None:
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    pythons = re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", PROJECT)] == pythons
    if not workflow.exists():
        pytest.skip("no workflows in a source distribution")
    parts = re.findall(r"^parts=\(([\w ]+)\)", CI, re.MULTILINE)[0].split()
    listed = re.findall(r"(?:part|python): \[(.+)\]", workflow.read_text())
    assert sorted([*parts, *pythons]) == sorted([*", ".join(listed).replace('"', "").split(", "), "readme"])


def tool(name: str) -> types.ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module(name)


def test_generated_tables_are_up_to_date() -> None:
    """Of settings, metrics and what is supported. After a change: `python tools/generated_tables.py`."""
    generated = tool("generated_tables")
    for page, tables in generated.pages():
        assert generated.with_tables(page.read_text(), tables) == page.read_text(), page


def test_a_release_has_absolute_links_and_urls(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cumem_sleep").mkdir()
    for name in ("README.md", "pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    repository, tag = "https://github.com/someone/something", f"v{cumem_sleep.__version__}"
    with pytest.raises(SystemExit, match=r"v999: pyproject\.toml says version"):
        tool("prepare_release").main(repository, "v999", "0f" * 20, tmp_path)
    assert (tmp_path / "pyproject.toml").read_text() == PROJECT
    tool("prepare_release").main(repository, tag, "0f" * 20, tmp_path)
    assert (tmp_path / "cumem_sleep" / "commit.txt").read_text() == "0f" * 20 + "\n"
    readme = (tmp_path / "README.md").read_text()
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)\s]+)\)", readme))
    assert f"]({repository}/raw/{tag}/docs/serve-page.png)" in readme
    assert f"]({repository}/blob/{tag}/docs/vllm.md#a-kv-cache-that-survives)" in readme
    assert "no package index" not in readme
    assert "`pip install cumem-sleep`" in readme
    assert "\npip install cumem-sleep                # changes no package that is there\n" in readme
    assert re.search(rf"^## {re.escape(tag[1:])} - \d{{4}}-\d\d-\d\d$", (tmp_path / "CHANGELOG.md").read_text(), re.M)
    assert f'[project.urls]\nHomepage = "{repository}"\n' in (tmp_path / "pyproject.toml").read_text()


@pytest.mark.slow
def test_a_build_compiles_only_what_has_changed(tmp_path: pathlib.Path) -> None:
    """Whatever the kind of installation: each has a folder of its own for what it builds."""
    pytest.importorskip("pybind11")
    tree, programs = tmp_path / "tree", tmp_path / "bin"
    sources = [tree / "csrc" / folder / "one.cpp" for folder in (".", "sim", "serve", "preload")]
    for file in (*sources, tree / "csrc" / "one.h", tmp_path / "cuda" / "include" / "cuda.h"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tree / "csrc" / "sim" / "exports.map").write_text("{ local: *; };\n")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    (tree / "cumem_sleep" / "serve").mkdir(parents=True)
    (tree / "cumem_sleep" / "integrations" / "torch_memory_saver" / "shim").mkdir(parents=True)
    programs.mkdir()
    environment = {**os.environ, "CXX": "compiler", "CUDA_HOME": f"{tmp_path}/cuda"}
    environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for name in ("compiler", "ccache"):
        with (programs / name).open("w") as program:
            program.write(
                f'#!/bin/sh\ncase "$*" in *" --version") echo "$VERSION"; exit;; esac\necho {name} >>{tmp_path}/calls\n'
            )
            program.write('exec "$@"\n' if name == "ccache" else 'exec c++ "$@"\n')
        os.chmod(programs / name, 0o755)

    def compiled(number: int, **changed: str) -> list[str]:
        (tmp_path / "calls").write_text("")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", f"{tmp_path}/{number}"]
        subprocess.run(command, cwd=tree, env={**environment, **changed}, check=True)
        return (tmp_path / "calls").read_text().split()

    linked = ["compiler"] * 4
    assert sorted(compiled(1)) == sorted(["ccache", "compiler"] * 4 + linked)
    assert compiled(2) == linked, "nothing has changed"
    sources[1].write_text("int one;\n")
    assert sorted(compiled(3)) == sorted(["ccache", "compiler", *linked])
    for change in ({"VERSION": "2"}, {"VERSION": "2", "CXXFLAGS": "-DONE"}):
        assert len(compiled(4, **change)) == 12, change
    (tree / "csrc" / "one.h").write_text("int one;\n")
    assert len(compiled(5)) == 12
    assert len([*(tree / "build").rglob("*.o")]) == 12, "of each kind of build the newest"
