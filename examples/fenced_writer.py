"""Refuse the write of a former holder, in the transaction that would store it.

The first holder is paused until another program holds the lock. When it continues, its write
arrives with an old fencing token, and the database refuses it.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

from tenure import blocking
from tenure.fencing import SQLFence

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")
fence = SQLFence("accounts")


def withdraw(database: sqlite3.Connection, lease: blocking.Lease, amount: int) -> None:
    with database:  # one transaction: the token is compared where the data is written
        fence.admit(database, lease)
        database.execute("UPDATE accounts SET balance = balance - ?", [amount])


def main() -> None:
    with blocking.connect(STORE) as client, closing(sqlite3.connect(":memory:")) as database:
        with database:
            fence.create_table(database)
            database.execute("CREATE TABLE accounts (balance INTEGER)")
            database.execute("INSERT INTO accounts VALUES (100)")

        paused = client.mutex("accounts").lock()
        paused.release()  # in place of a pause in which its session expires
        with client.mutex("accounts").lock() as lease:
            withdraw(database, lease, 10)
        try:
            withdraw(database, paused, 50)
        except blocking.StaleToken:
            print("the late write was refused")
        (balance,) = database.execute("SELECT balance FROM accounts").fetchone()
        print("balance:", balance)


if __name__ == "__main__":
    main()
