"""What `tools/check_release.sh` has left in dist/: what would be published."""

from __future__ import annotations

import json
import pathlib
import re
import tarfile
import zipfile
from email.parser import Parser

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import cumem_sleep

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
COMMIT = (ROOT / "cumem_sleep" / "commit.txt").read_text()  # `git archive` has named it here


def the_only(pattern: str) -> pathlib.Path:
    """The one file of that name in dist/."""
    (found,) = (ROOT / "dist").glob(pattern)
    return found


def test_the_wheel_is_for_every_linux_that_is_new_enough() -> None:
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_2_\d\d_x86_64\.whl$", the_only("*.whl").name)


def test_wheel_and_source_distribution_name_the_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}\n", COMMIT)
    with zipfile.ZipFile(the_only("*.whl")) as wheel:
        assert wheel.read("cumem_sleep/commit.txt").decode() == COMMIT
    with tarfile.open(the_only(f"cumem_sleep-{cumem_sleep.__version__}.tar.gz")) as source:
        (name,) = [name for name in source.getnames() if name.endswith("/cumem_sleep/commit.txt")]
        packed = source.extractfile(name)
        assert packed is not None
        assert packed.read().decode() == COMMIT


def files(*folders: str) -> set[str]:
    """All files of these folders that are no traces of a run."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_wheel_and_source_distribution_have_all_files_that_belong_to_them() -> None:
    with zipfile.ZipFile(the_only("*.whl")) as wheel:
        assert files("cumem_sleep") <= {*wheel.namelist()}
    with tarfile.open(the_only("*.tar.gz")) as source:
        packed = {name.partition("/")[2] for name in source.getnames()}
    assert files("cumem_sleep", "csrc", "tests", "benchmarks", "docs", "examples", "tools") <= packed


def test_the_bill_of_materials_is_valid_and_names_every_requirement() -> None:
    text = (ROOT / "dist.sbom.json").read_text()
    materials = json.loads(text)
    version = SchemaVersion.from_version(materials["specVersion"])
    assert JsonStrictValidator(version).validate_str(text) is None
    assert materials["metadata"]["component"]["name"] == "cumem-sleep"
    with zipfile.ZipFile(the_only("*.whl")) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    lines = metadata.get_all("Requires-Dist") or []
    required = [line for line in lines if "extra" not in line or re.search("extra == .serve.", line)]
    names = {plain(re.split(r"[^\w.-]", line)[0]) for line in required}
    assert len(names) > 5
    listed = {plain(component["name"]) for component in materials["components"]}
    assert names <= listed
    assert all(component.get("purl", "").startswith("pkg:pypi/") for component in materials["components"])


def plain(name: str) -> str:
    """A distribution's name in its one form."""
    return re.sub(r"[-_.]+", "-", name).lower()
