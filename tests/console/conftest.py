"""Shorter pauses than those of a console for people."""

from __future__ import annotations

import pytest

from tenure.console import live, observer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "INTERVAL", 0.05)
    monkeypatch.setattr(live, "INTERVAL", 0.05)
