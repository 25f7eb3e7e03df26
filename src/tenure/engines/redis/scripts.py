"""The scripts: each operation is one of them, and what Redis knows it by.

``lua/head.lua`` is what each begins with; ``body.lua`` and ``rest.lua`` are functions for those
that go beyond the usual case. A script names them where it wants them, so that the usual case does
not pay for what it never calls: in Lua, making a function costs about what looking up a key does.
"""

from __future__ import annotations

import hashlib
from importlib import resources

__all__ = ["SCRIPTS", "Script"]

_NAMES = (
    *("acknowledge", "admin", "attach", "begin", "believed", "change", "describe", "hello"),
    *("leave", "look", "operate", "reattach", "renew", "takeover", "tick", "watch"),
)


class Script:
    """A script's text, and its digest."""

    __slots__ = ("digest", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _load() -> dict[str, Script]:
    folder = resources.files(__package__) / "lua"
    parts = {
        f"--#{part}\n": (folder / f"{part}.lua").read_text("utf-8")
        for part in ("head", "body", "rest", "alone", "usual", "save")
    }
    scripts = {}
    for name in _NAMES:
        text = (folder / f"{name}.lua").read_text("utf-8")
        for mark, part in parts.items():
            text = text.replace(mark, part)
        scripts[name] = Script(name, text)
    return scripts


SCRIPTS = _load()
