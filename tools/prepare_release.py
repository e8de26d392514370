"""Makes a checkout ready to be packaged: its repository, its tag and its commit are known only then.

python tools/prepare_release.py https://github.com/OWNER/NAME v1.2.3 COMMIT

Links and images of README.md become absolute, so that a package page shows them too; pyproject.toml gets the project's
URLs, and the package the commit. The tag has to be the version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def absolute(readme: str, repository: str, tag: str) -> str:
    """README.md with absolute links."""
    readme = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/raw/{tag}/", readme)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/blob/{tag}/", readme)


def with_urls(project: str, repository: str, tag: str) -> str:
    """pyproject.toml with the table of URLs."""
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return project.replace("\n[project.scripts]", f"\n[project.urls]\n{table}\n[project.scripts]")


def main(repository: str, tag: str, commit: str, root: Path = Path()) -> None:
    """Rewrite these three files below `root`."""
    readme, project = root / "README.md", root / "pyproject.toml"
    text = project.read_text()
    version = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    if version is None or tag != f"v{version[1]}":
        raise SystemExit(f"{tag}: pyproject.toml says version {version and version[1]}")
    readme.write_text(absolute(readme.read_text(), repository, tag))
    project.write_text(with_urls(text, repository, tag))
    (root / "cumem_sleep" / "commit.txt").write_text(f"{commit}\n")  # the build would call it changed


if __name__ == "__main__":
    main(*sys.argv[1:4])
