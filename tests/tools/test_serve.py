"""`cumem-sleep serve` where its packages are missing."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

WITHOUT_YAML = "import sys; sys.modules['yaml'] = None; from cumem_sleep.tools import cli; sys.exit(cli.main())"


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--check"], []], ids=["check", "serve"])
def test_without_its_packages(options: list[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "models.yaml").write_text("models: {}")
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_YAML, "serve", str(tmp_path / "models.yaml"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.endswith(
        "`serve` needs more packages (yaml is not installed); in a checkout: pip install '.[serve]'\n"
    )
