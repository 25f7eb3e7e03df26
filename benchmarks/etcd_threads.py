"""Pairs of `etcd3`'s Lock by threads: a process that prints what they did, as JSON.

Its waiters look for the holder's key first and watch it afterwards, so that one may miss the
release and wait for ever. Nobody waits for those.

``python -m benchmarks.etcd_threads PORT THREADS SECONDS ONE_KEY``
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import etcd3

PATIENCE = 5.0
"""Seconds for the last turns, after the time is over."""


def main() -> None:
    """Measure the pairs and print them as JSON."""
    port, threads, seconds, one_key = (float(argument) for argument in sys.argv[1:])
    client = etcd3.client(host="127.0.0.1", port=int(port))
    done, waits = [0] * int(threads), []
    began = time.perf_counter()
    ends = [began] * int(threads)

    def work(number: int) -> None:
        while (asked := time.perf_counter()) < began + seconds:
            lock = client.lock("t-key" if one_key else f"t-key-{number}", ttl=60)
            lock.acquire(timeout=None)
            waits.append(time.perf_counter() - asked)
            done[number] += 1
            lock.release()
            ends[number] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, began + seconds + PATIENCE - time.perf_counter()))
    print(json.dumps({"done": done, "waits": waits, "seconds": max(ends) - began}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
