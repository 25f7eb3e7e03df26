"""Templates, and the filters with which they show values.

Everything is escaped for HTML (autoescape), and text of the store is made visible as well (`safe`):
control characters and marks that reverse the direction of text are shown as their codes.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tenure.console.views import kind_of, tokens
from tenure.shown import duration, safe, shown_data

LONGEST_NAME = 120
"""Characters of a name in a list; the whole name is in its title."""

ASSETS = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def link(root: str, path: str, **query: object) -> str:
    """Return the URL of a page; empty parameters are left out."""
    given = {name: value for name, value in query.items() if value not in {"", None}}
    url = quote(root) + path
    return f"{url}?{urlencode(given, safe='/', errors='surrogatepass')}" if given else url


def name_in(text: str, longest: int = LONGEST_NAME) -> Markup:
    """Return a name, isolated from the direction of the text around it."""
    shown = safe(text)
    if len(shown) <= longest:
        return Markup('<bdi class="name">{}</bdi>').format(shown)
    return Markup('<bdi class="name" title="{}">{}…</bdi>').format(shown, shown[:longest])


def data_in(data: bytes, longest: int = 60) -> Markup:
    """Return the beginning of data, as text where it is text."""
    return (
        Markup('<bdi class="data">{}</bdi>').format(shown_data(data, longest)) if data else Markup()
    )


def time_in(seconds: float | None) -> Markup:
    """Return a duration, with its length for programs."""
    if seconds is None:
        return Markup('<span class="unknown">unknown</span>')
    seconds = max(0.0, seconds)
    whole = int(seconds)
    shown = f"{whole} s" if 1 <= seconds < 60 else duration(seconds)
    return Markup('<time datetime="PT{}S">{}</time>').format(f"{seconds:.1f}", shown)


def process_in(each: Any) -> Markup:
    """Return the program, host and pid of a request or a session."""
    program, host, pid = each.program, each.host, each.pid
    parts = []
    if program:
        parts.append(Markup("<b>{}</b>").format(name_in(program, 60)))
    where = Markup(" on ").join(
        filter(None, ("" if pid is None else f"pid {pid}", name_in(host, 60) if host else ""))
    )
    if where:
        parts.append(Markup('<span class="where">{}</span>').format(where))
    return Markup(" ").join(parts)


def fitted(text: str, columns: int) -> str:
    """Return a text as it fits into a picture; wide characters take two columns.

    It is isolated from the direction of the text around it, because a picture has no ``bdi``.
    """
    shown = safe(text)
    width = 0
    for at, each in enumerate(shown):
        width += 2 if unicodedata.east_asian_width(each) in "WF" else 1
        if width > columns:
            shown = f"{shown[: max(0, at - 1)]}…"
            break
    return shown if shown.isascii() else f"\u2068{shown}\u2069"


def place_of(each: Any) -> str:
    """Return the pid and the host of a request or a session."""
    pid = "" if each.pid is None else f"pid {each.pid}"
    return " on ".join(filter(None, (pid, each.host)))


def several(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Rendering:
    """Templates and files of the console.

    Attributes:
        assets: the content of each file by its name.
        version: digest of the files, a part of their URLs, so that browsers keep them.
    """

    def __init__(self) -> None:
        self._environment = Environment(
            loader=PackageLoader("tenure.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "data": data_in,
            "duration": time_in,
            "fitted": fitted,
            "kind": kind_of,
            "name": name_in,
            "place": place_of,
            "process": process_in,
            "safe_text": safe,
            "seconds": duration,
            "tokens": tokens,
        }
        self._environment.globals |= {"link": link, "several": several, "zip": zip}
        folder = files("tenure.console") / "static"
        self.assets = {name: (folder / name).read_bytes() for name in ASSETS}
        joined = b"\0".join(self.assets.values())
        self.version = hashlib.blake2b(joined, digest_size=6).hexdigest()

    def page(self, template: str, values: Mapping[str, Any]) -> str:
        """Return a complete page."""
        return self._environment.get_template(template).render(values, version=self.version)

    def part(self, template: str, values: Mapping[str, Any]) -> str:
        """Return the part of a page that is kept up to date."""
        found = self._environment.get_template(template)
        context = found.new_context({**values, "version": self.version})
        return "".join(found.blocks["main"](context))
