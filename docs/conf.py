"""Configuration of the documentation site, which `make docs` builds."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

project = "tenure"
author = "The tenure authors"
version = release = version_of("tenure")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]  # tabs whose blocks are read as any other
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
suppress_warnings = ["ref.python"]  # a name of both APIs in an annotation; either page helps
default_role = "py:obj"  # a link where the name is known, and code elsewhere

html_theme = "furo"
html_title = f"tenure {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"

_FIELDS = {"connector"}  # those that look like methods
_GOOGLE = Config(napoleon_use_rtype=False)


def _read_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Convert a docstring in Google's style; a colon in its first line is only a colon."""
    kind = "method" if what in {"property", "attribute", "data"} else what
    lines[:] = GoogleDocstring(lines, _GOOGLE, app, kind, name, obj, options).lines()


def _hide_constructor(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, result: str
) -> tuple[str, None] | None:
    """Show how an object is made only where a program may make it."""
    if not signature or what not in {"class", "exception"} or _is_record(obj):
        return None
    made = obj.__dict__.get("__init__")
    public = made is not None and "Args:" in (inspect.getdoc(obj) or "")
    return None if public else ("", None)


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _name_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace links to files outside of this folder, which are not on the site, by their paths."""
    page, root = Path(app.env.doc2path(name)).parent, Path(app.srcdir).parent

    def path_only(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page / link[2]))
        is_page = target.is_relative_to(app.srcdir)
        return link[0] if is_page else f"{link[1]} (`{target.relative_to(root)}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[\w./-]+)\)", path_only, source[0])


def _skip_field(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of a class, which its docstring describes."""
    is_field = name in _FIELDS or type(obj).__name__ == "_tuplegetter"  # of a NamedTuple
    return True if is_field else None


def setup(app: Sphinx) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-skip-member", _skip_field)
    app.connect("source-read", _name_files)
    app.connect("autodoc-process-docstring", _read_docstring)
    app.connect("autodoc-process-signature", _hide_constructor)
