"""No attack costs a well-behaved client its lease, or the server its memory or its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.arena import arena
from tests.hostile.attacks import ATTACKS

SECONDS = 2.0
"""Of each attack."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_costs_no_other_client_its_lease(name: str, tmp_path: Path) -> None:
    async with arena(ATTACKS[name], tmp_path) as beside:
        await beside.hold(SECONDS)
