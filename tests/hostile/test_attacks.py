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


CASES = [
    pytest.param(store, name, id=f"{store.__name__}-{name}")
    for store in (sqlite, postgresql)
    for name in ATTACKS
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("store", "name"), CASES)
async def test_an_attack_costs_no_other_client_its_lease(
    store: Callable[[Path], AbstractContextManager[str]], name: str, tmp_path: Path
) -> None:
    with store(tmp_path) as url:
        async with arena(ATTACKS[name], tmp_path, url) as beside:
            await beside.hold(SECONDS)
