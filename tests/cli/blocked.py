"""A program of two threads, or one, that takes locks one inside the other, and says so."""

from __future__ import annotations

import sys
import threading

from tenure import Deadlock, blocking

OUTPUT = threading.Lock()


def say(text: str) -> None:
    with OUTPUT:
        print(text, flush=True)  # noqa: T201  the test reads it


def take(session: blocking.Session, outer: str, inner: str) -> None:
    with session.mutex(outer).lock():
        say(f"inside {outer}")
        go.wait()
        try:
            with session.mutex(inner).lock():
                say(f"inside {inner} too")
        except Deadlock as error:
            say(f"deadlock: {error}")


if __name__ == "__main__":
    url, on_deadlock, *pairs = sys.argv[1:]
    go = threading.Event()
    with blocking.connect(url) as client, client.session(on_deadlock=on_deadlock) as session:  # type: ignore[arg-type]
        threads = [threading.Thread(target=take, args=(session, *pair)) for pair in pairs]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        go.set()
        for thread in threads:
            thread.join()
