"""Defects in what Redis runs: a line of the scripts becomes another one."""

from __future__ import annotations

import pytest

from tenure.engines.redis.lua import SCRIPTS, Script
from tests.corpus.rows import Plant


def in_lua(line: str, by: str) -> Plant:
    """Plant something in the place of a line, wherever it is."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        found = [script for script in SCRIPTS.values() if line in script.text]
        assert found, f"no script has {line!r} any more"
        for script in found:
            worse = Script(script.name, script.text.replace(line, by))
            patch.setattr(script, "text", worse.text)
            patch.setattr(script, "digest", worse.digest)

    return plant
