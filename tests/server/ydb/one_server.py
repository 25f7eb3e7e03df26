"""A program: one server on a store, until it is killed.

    python -m tests.server.ydb.one_server STORE PORT

It says the port on which it listens.
"""

from __future__ import annotations

import asyncio
import sys

from tests.server.ydb.raw import serving


async def serve(store: str, port: str) -> None:
    async with serving(store, url=f"ydb://127.0.0.1:{port}") as server:
        sys.stdout.write(server.target + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
