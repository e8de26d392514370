"""Builds the documentation: `sphinx-build -W --keep-going docs build/docs`. Fetches nothing from the network."""

from sphinx.ext.napoleon.docstring import GoogleDocstring

from cumem_sleep import __version__

project = "cumem-sleep"
copyright = "the cumem-sleep maintainers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3  # links to headings, as GitHub makes them
default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True


def _description(docstring: GoogleDocstring, lines: list[str]) -> list[str]:
    return GoogleDocstring(docstring._dedent(lines), docstring._config).lines()


def _inline_attribute(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    return "", _description(docstring, docstring._consume_to_end())


def _returns_section(docstring: GoogleDocstring, **_: bool) -> list[tuple[str, str, list[str]]]:
    return [("", "", _description(docstring, docstring._consume_to_next_section()))]


# Napoleon takes for a type what is before a colon in the first line of a property, or of "Returns".
GoogleDocstring._consume_inline_attribute = _inline_attribute
GoogleDocstring._consume_returns_section = _returns_section

add_module_names = False

html_theme = "furo"
html_title = f"cumem-sleep {__version__}"
html_theme_options = {"navigation_with_keys": True}
