"""Sphinx configuration of the documentation site, which `make docs` builds from the pages of the repository.

The source directory is the repository, so that the links between pages work on the site and in the
repository.
"""

from typing import Any

from sphinx.application import Sphinx
from sphinx.ext import napoleon

import agent.config.config
from agent.prepare.error_tables import ErrorPattern
from agent.version import VERSION

project = "drahealth"
author = "the drahealth authors"
release = version = VERSION

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/*/README.md",
    "go/README.md",
]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = f"drahealth {VERSION}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_additional_pages = {"index": "redirect.html"}  # the pages are below docs/
templates_path = ["templates"]

# Imported there for type checkers only; autodoc evaluates the annotations.
agent.config.config.ErrorPattern = ErrorPattern  # type: ignore[attr-defined]

SECTIONS = napoleon.Config()


def setup(app: Sphinx) -> None:
    """Register the conversion of docstrings."""
    app.connect("autodoc-process-docstring", convert_docstring)


def convert_docstring(
    app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """Convert the sections of a docstring, such as "Args:", to reStructuredText.

    Attributes have no sections. The extension napoleon is not used, because it reads the text before a colon
    in the first line of an attribute's docstring as a type.
    """
    if what not in ("attribute", "property"):
        docstring = napoleon.GoogleDocstring(list(lines), SECTIONS, app, what, name, value, options)
        lines[:] = docstring.lines()
