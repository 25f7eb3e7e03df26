"""What a ``sqlite://`` URL says: which file, who may use it, and what a commit survives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote_to_bytes

from tenure.errors import InvalidArgument

__all__ = ["PRIVATE", "Address", "parse"]

PRIVATE = 0o600
_MODES = (PRIVATE, 0o660, 0o666)
_DURABILITIES = ("process", "full")
_EXAMPLES = (
    "sqlite:///jobs.db is a file in the current folder, sqlite:////var/lib/jobs.db one anywhere"
)


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: as it was given, with an absolute path.
        path: of the database, absolute.
        mode: the permissions of every file of the store.
        durability: ``"process"``: a commit survives the death of every process; ``"full"``: it
            survives the death of the machine too.
    """

    url: str
    path: str
    mode: int
    durability: Literal["process", "full"]

    @property
    def shared(self) -> bool:
        """Whether other users are meant to use the file."""
        return self.mode != PRIVATE


def parse(url: str) -> Address:
    """Understand a URL; a relative path counts from the current folder."""
    rest, fragment_mark, _ = url.partition("://")[2].partition("#")
    location, _, query = rest.partition("?")
    host, slash, path = location.partition("/")
    if fragment_mark:
        raise InvalidArgument(f"{url!r} has a '#'; in a file's name write it as %23")
    if host == ":memory:" or path == ":memory:":
        raise InvalidArgument(f"{url!r} would be one program's own; use memory://")
    if host:
        raise InvalidArgument(
            f"{url!r} names a host, {host!r}; write sqlite:///{host}{slash}{path} for a path that "
            f"counts from the current folder, or sqlite:////{host}{slash}{path} for an absolute one"
        )
    if not slash or not path.strip("/"):
        raise InvalidArgument(f"{url!r} names no file: {_EXAMPLES}")
    if path.endswith("/"):
        raise InvalidArgument(f"{url!r} names a folder; add the name of a file to it")
    if path.startswith("~"):
        raise InvalidArgument(
            f"{url!r}: '~' is not expanded; write the whole path after four slashes"
        )
    decoded = os.fsdecode(unquote_to_bytes(os.fsencode(path)))
    if "\0" in decoded:
        raise InvalidArgument(f"{url!r}: no file has a NUL in its name")
    options = _options(url, query)
    durability = options.get("durability", "process")
    if durability not in _DURABILITIES:
        raise InvalidArgument(f"{url!r}: durability is process or full, not {durability!r}")
    absolute = os.path.abspath(decoded)
    if absolute != decoded:
        url = f"sqlite:///{quote(os.fsencode(absolute))}{'?' if query else ''}{query}"
    return Address(
        url,
        absolute,
        _mode(url, options.get("mode")),
        "full" if durability == "full" else "process",
    )


def _options(url: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in {"mode", "durability"}:
            raise InvalidArgument(
                f"{url!r}: there is no parameter {name!r}; there are mode (0600, 0660, 0666) and "
                "durability (process, full)"
            )
        if name in options:
            raise InvalidArgument(f"{url!r} has {name} twice")
        options[name] = value
    return options


def _mode(url: str, text: str | None) -> int:
    if text is None:
        return PRIVATE
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if mode not in _MODES:
        raise InvalidArgument(
            f"{url!r}: mode is 0600 (the owner alone), 0660 (its group too) or 0666 (everyone), "
            f"not {text!r}"
        )
    return mode
