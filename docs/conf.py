"""Builds the documentation: `sphinx-build -W --keep-going docs build/docs`. Fetches nothing from the network."""

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
add_module_names = False

html_theme = "furo"
html_title = f"cumem-sleep {__version__}"
html_theme_options = {"navigation_with_keys": True}
