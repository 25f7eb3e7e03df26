"""A server for the tests: ``python -m tests.chaos.echo PORT FILE`` sends back what it is sent.

It counts its starts in a file, which is all the data that it has, and says the number first.
"""

import asyncio
import sys
from pathlib import Path


def counted(data: Path) -> int:
    starts = int(data.read_text()) + 1 if data.exists() else 1
    data.write_text(str(starts))
    return starts


async def main(port: int, starts: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d\n" % starts)
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), counted(Path(sys.argv[2]))))
