"""Permissions and quotas of a token file, in a server that is running."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

import tenure
from tests.server.serving import PATIENCE, serving

TOKEN = "a-token-of-a-test-0123456789"


def write(file: Path, rights: str) -> None:
    file.touch(0o600)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    file.write_text(f'[tokens.billing]\nhash = "sha256:{digest}"\n{rights}\n')


async def test_a_reload_changes_what_a_session_that_lives_may_do(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    write(file, 'permissions = {"/default" = "hold"}\nquotas = {requests = 1}')
    async with serving(tmp_path, "--auth-token-file", str(file)) as server:
        url = server.address.replace("://", f"://{TOKEN}@")
        async with tenure.connect(url) as client, client.session() as session:
            async with session.mutex("m").lock(timeout=PATIENCE):
                with pytest.raises(tenure.EngineError, match="billing has reached its quota"):
                    await session.mutex("n").lock(timeout=PATIENCE)
            write(file, 'permissions = {"/default" = "read"}')
            server.send(signal.SIGHUP)
            await server.until("reloaded")
            with pytest.raises(tenure.AuthenticationFailed, match="may not acquire"):
                await session.mutex("m").lock(timeout=PATIENCE)
            write(file, 'permissions = {"/default" = "hold"}')
            server.send(signal.SIGHUP)
            await server.until("reloaded")
            async with (
                session.mutex("m").lock(timeout=PATIENCE),
                session.mutex("n").lock(timeout=PATIENCE),
            ):
                pass
