"""A proxy that announces its clients with the PROXY protocol is refused, with a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.certificates import Authority
from tests.server.serving import PATIENCE, Served, serving

HEADERS = {
    "version 1": b"PROXY TCP4 127.0.0.1 127.0.0.1 50000 7070\r\n",
    "version 1, of a health check": b"PROXY UNKNOWN\r\n",
    "version 2": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12),
    "version 2, of a health check": b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0",
}
INPUT = {
    "tenure": b"\0\0\0\x01\x90",
    "ydb": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "dflockd": b"l\nkey\n5\n",
}


def told(server: Served) -> list[dict[str, str]]:
    """The lines about connections that were refused."""
    lines = [json.loads(each) for each in server.raw.decode().splitlines() if each[:1] == "{"]
    return [each for each in lines if "PROXY protocol" in json.dumps(each)]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("tls", ["", "s"], ids=["plain", "TLS"])
async def test_what_the_proxy_is_to_turn_off_is_logged(
    tls: str, header: str, tmp_path: Path
) -> None:
    pair = Authority(tmp_path).signs("server")
    options = ("--tls-cert", pair.cert, "--tls-key", pair.key) if tls else ()
    listen = [f"{each}{tls}://127.0.0.1:0" for each in INPUT]
    async with serving(tmp_path, *options, listen=listen) as server:
        for address, text in zip(server.addresses, INPUT.values(), strict=True):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(address).port)
            writer.write(HEADERS[header] + text)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(PATIENCE):
                    await reader.read()  # until the server closes it
            writer.close()
        assert await server.end() == 0
    lines = told(server)
    assert len(lines) == len(INPUT), server.raw.decode()
    assert all("send-proxy" in json.dumps(each) for each in lines)
    assert b"Traceback" not in server.raw
