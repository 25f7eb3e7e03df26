"""Renewals that the database refuses: their log lines, and the loss of the leases."""

from __future__ import annotations

import contextlib

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.postgresql.schema import initialize
from tenure.engines.postgresql.url import parse
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import an_engine, until
from tests.engines.postgresql.servers import PostgresServer

_GRANT = """
    GRANT USAGE ON SCHEMA tenure TO program;
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tenure TO program"""
_REVOKE = "REVOKE EXECUTE ON FUNCTION tenure.renew FROM program"
_WINDOW = 20.0


class _Ahead(SystemClock):
    """A clock that a test puts forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.fixture
def url(server: PostgresServer) -> str:
    """The URL of a store for an account whose rights can be revoked."""
    server.execute("CREATE ROLE program LOGIN")
    initialize(parse(server.url))
    server.execute(_GRANT)
    return server.url.replace("tenure@", "program@")


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "could not be renewed" in each]


async def test_each_reason_of_refused_renewals_is_logged_once(
    server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with an_engine(url, SystemClock()) as engine:
        session = await engine.attach(Attach("/default", 60), Recorder())

        async def renew() -> None:
            for _ in range(3):
                session.renew()
                # The first read may be sent before the renewal; the answer to the second is later.
                for _ in range(2):
                    with contextlib.suppress(tenure.EngineError):
                        await engine.store_time()

        await renew()
        assert (session.refusal, _logged(caplog)) == ("", [])
        refusals = []
        for change in (_REVOKE, "REVOKE USAGE ON SCHEMA tenure FROM program"):
            server.execute(change)
            await renew()
            refusals.append(session.refusal)
        function, schema = _logged(caplog)
        assert function.endswith("error=permission denied for function renew")
        assert schema.endswith("error=permission denied for schema tenure")
        assert refusals == [
            f"{engine.url} refuses to renew sessions: permission denied for function renew",
            f"{engine.url} refuses to renew sessions: permission denied for schema tenure",
        ]
        server.execute(_GRANT)
        await renew()
        assert session.refusal == ""
        server.execute(_REVOKE)
        await renew()
        assert _logged(caplog) == [function, schema, function]


async def test_a_loss_names_the_reason_for_which_renewals_were_refused(
    server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = _Ahead()
    async with tenure.connect(url, clock=clock) as client:
        session = await client.session(recovery_window=_WINDOW)
        lease = await session.mutex("m").lock()
        server.execute(_REVOKE)
        clock.ahead += _WINDOW / 2  # it is time to renew
        await until(lambda: bool(_logged(caplog)))
        lease.check()
        clock.ahead += _WINDOW
        assert not lease.held
        why = "refuses to renew sessions: permission denied for function renew"
        with pytest.raises(tenure.SessionExpired, match=why):
            await session.mutex("other").lock()
        with pytest.raises(tenure.LeaseLost, match=why):
            lease.check()
