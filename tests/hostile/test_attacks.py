"""No attack costs a well-behaved client its lease, or the server its memory or its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.engines.postgresql.servers import a_schema
from tests.hostile.arena import arena
from tests.hostile.attacks import ATTACKS

SECONDS = 2.0
"""Of each attack."""


def sqlite(folder: Path) -> AbstractContextManager[str]:
    return nullcontext(f"sqlite:///{folder}/store.db")


def postgresql(folder: Path) -> AbstractContextManager[str]:
    return a_schema()


NOT_BOUNDED = {"reads-descriptions", "reads-resumes"}
"""Attacks that exceed the bounds of a server on PostgreSQL, which docs/operate/load.md says."""

CASES = [pytest.param(sqlite, name, id=f"sqlite-{name}") for name in ATTACKS] + [
    pytest.param(postgresql, name, id=f"postgresql-{name}")
    for name in ATTACKS
    if name not in NOT_BOUNDED
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("store", "name"), CASES)
async def test_an_attack_costs_no_other_client_its_lease(
    store: Callable[[Path], AbstractContextManager[str]], name: str, tmp_path: Path
) -> None:
    with store(tmp_path) as url:
        async with arena(ATTACKS[name], tmp_path, url) as beside:
            await beside.hold(SECONDS)
