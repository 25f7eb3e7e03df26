"""Histories in files: one record per line, and one file per process.

A record is one JSON object, ``{"kind": "granted", "at": 1.5, ...}``; bytes are decoded as latin-1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from tenure.testing.history.records import KINDS, History, Record

_KINDS = {kind.__name__.lower(): kind for kind in KINDS}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in KINDS}
_BYTES = frozenset({"argument", "result", "value", "data"})  # bytes fields, written as text


def to_json(record: Record) -> str:
    """Return a record as one line, without the line ending."""
    kind = type(record)
    facts: dict[str, Any] = {"kind": kind.__name__.lower()}
    for name in _FIELDS[kind]:
        value = getattr(record, name)
        facts[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return json.dumps(facts)


def from_json(line: str | bytes) -> Record:
    """Return the record that `to_json` wrote as this line.

    Raises:
        ValueError: the line is not a record.
    """
    facts = json.loads(line)
    try:
        kind = _KINDS[facts.pop("kind")]
        for name, value in facts.items():
            if isinstance(value, list):
                facts[name] = tuple(value)
            elif name in _BYTES and isinstance(value, str):
                facts[name] = value.encode("latin-1")
        return kind(**facts)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no record of a history: {line!r}") from error


def dump(records: Iterable[Record], path: str | PathLike[str]) -> None:
    """Write records to a file that `load` reads."""
    with Path(path).open("w", encoding="ascii") as file:
        file.writelines(to_json(record) + "\n" for record in records)


class AppendOnly:
    """File as a sink for records: each call writes one record as a whole line before it returns.

    Attributes:
        path: the path of the file; its existing contents are kept.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Open the file at `path` for appending, and create it if it is missing."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __call__(self, record: Record) -> None:
        """Write one record as a line.

        Raises:
            OSError: not all of the line was written.
        """
        line = to_json(record).encode("ascii") + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def load(paths: Iterable[str | PathLike[str]], skew: float = 0.0, slack: float = 0.0) -> History:
    """Return the history that is stored in several files, one per process.

    The last line of a file may be incomplete, because its process was killed while it wrote; such
    a line is ignored.

    Raises:
        ValueError: a complete line is not a record.
    """
    return History((record for path in paths for record in _lines(Path(path))), skew, slack)


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # an incomplete last line
            try:
                yield from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
