"""One of several programs that write to one SQLite file, behind one fence, as fast as they can.

``python -m tests.fencing.crowd PATH SEED STEPS`` says that it is ready, begins when its standard
input says so, and ends by printing how many of its writes were refused.
"""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing

from tenure.errors import StaleToken
from tenure.fencing import SQLFence

FENCE = SQLFence("notes")


def main(path: str, seed: str, steps: str) -> None:
    chance, refused = random.Random(int(seed)), 0
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        connection.isolation_level = "IMMEDIATE"  # how the first statement begins a transaction
        connection.execute("PRAGMA synchronous = OFF")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        for step in range(int(steps)):
            token = step // 4 + chance.randrange(10)
            try:
                with connection:
                    FENCE.admit(connection, token)
                    connection.execute("INSERT INTO notes (token) VALUES (?)", [token])
            except StaleToken:
                refused += 1
    sys.stdout.write(f"{refused}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
