"""Run a nightly job on exactly one of several machines.

Start this program on every machine at the same time: one of them does the work, the others print
that there is nothing to do. A job that fails is due again for the next caller.
"""

from __future__ import annotations

import os
from datetime import timedelta

from tenure import blocking

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")


def back_up() -> None:
    print("backing up")


def main() -> None:
    with blocking.connect(STORE) as client:
        run = client.once("backup", per=timedelta(hours=12))
        if run is None:
            last = client.last_run("backup")
            print("nothing to do; the last run was started by", last.program if last else "?")
            return
        with run:
            back_up()


if __name__ == "__main__":
    main()
