"""Defects in what PostgreSQL runs: a line of the functions becomes another one."""

from __future__ import annotations

import pytest

from tenure.engines.postgresql import schema
from tests.corpus.rows import Plant


def in_sql(line: str, by: str) -> Plant:
    """Plant something in the place of a line, in the stores that are created from now on."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = schema.creation

        def worse(name: str) -> str:
            text = sound(name)
            assert line in text, f"no function has {line!r} any more"
            return text.replace(line, by)

        patch.setattr(schema, "creation", worse)

    return plant
