"""A backend for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.telemetry.helpers import Backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.meters.shutdown()
    backend.tracers.shutdown()
