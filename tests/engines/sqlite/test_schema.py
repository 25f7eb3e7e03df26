"""How a connection to the file is opened."""

from __future__ import annotations

import threading
from pathlib import Path

from tenure.engines.sqlite import schema
from tenure.engines.sqlite.url import parse


def test_all_who_open_a_new_file_at_the_same_moment_get_it(tmp_path: Path) -> None:
    failures: list[Exception] = []
    for number in range(100):  # about one in a hundred met the moment
        path = tmp_path / f"{number}.db"
        path.touch()
        address = parse(f"sqlite:///{path}")
        together = threading.Barrier(8)

        def opens() -> None:
            together.wait()  # noqa: B023  joined below
            try:
                schema.connect(address).close()  # noqa: B023
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=opens) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
