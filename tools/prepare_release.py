"""Makes a checkout ready to be packaged: its repository, its tag and its commit are known only then.

python tools/prepare_release.py https://github.com/OWNER/NAME v1.2.3 COMMIT

README.md says how to install from the index. Its links and images become absolute, so that a package page shows them
too, and pyproject.toml gets the project's URLs; not with an empty address. The package gets the commit, and what
CHANGELOG.md has under "Unreleased" the version and today's date. The tag has to be the version.
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

UNTIL_THE_RELEASE = re.compile(r"<!-- until the release -->\n.*?\n<!-- /until the release -->\n", re.DOTALL)
OF_A_CHECKOUT = re.compile(r"pip install \. +# of a checkout; ")


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
    """Rewrite these four files below `root`.

    Raises:
        SystemExit: the version is another one, or README.md lacks the marks.
    """
    readme, project = root / "README.md", root / "pyproject.toml"
    text = project.read_text()
    version = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    if version is None or tag != f"v{version[1]}":
        raise SystemExit(f"{tag}: pyproject.toml says version {version and version[1]}")
    said, marked = UNTIL_THE_RELEASE.subn("Install it with `pip install cumem-sleep`.\n", readme.read_text())
    said, named = OF_A_CHECKOUT.subn("pip install cumem-sleep                # ", said)
    if (marked, named) != (1, 1):
        raise SystemExit(
            "README.md: expected once the marks `until the release`, and `pip install .  # of a checkout; `"
        )
    changes = root / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased", f"## {version[1]} - {date.today()}", 1))
    readme.write_text(absolute(said, repository, tag) if repository else said)
    if repository:
        project.write_text(with_urls(text, repository, tag))
    (root / "cumem_sleep" / "commit.txt").write_text(f"{commit}\n")  # the build would call it changed


if __name__ == "__main__":
    main(*sys.argv[1:4])
