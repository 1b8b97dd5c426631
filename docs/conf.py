"""Sphinx's configuration: `make docs` builds the site from this folder, and fails on any warning."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import generated

from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "kfp-gpuquota"
author = "The kfp-gpuquota authors"
project_copyright = author
release = version = __version__
html_title = f"kfp-gpuquota {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
exclude_patterns = ["_build"]
default_role = "code"
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}

_SOURCES = "https://github.com/kfp-gpuquota/kfp-gpuquota/blob/main/"


def link_to_sources(_app: Sphinx, name: str, content: list[str]) -> None:
    """Files outside of docs/ are not part of the site: links to them lead to the repository."""
    up = "../" * (name.count("/") + 1)
    content[0] = re.sub(rf"\]\({re.escape(up)}([^)]*)\)", rf"]({_SOURCES}\1)", content[0])


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    generated.write(Path(__file__).parent / "reference")
    app.connect("source-read", link_to_sources)
