"""One attack as a process: ``python -m tests.hostile.attacker NAME TARGET``, until stdin ends."""

from __future__ import annotations

import sys
import threading

from tests.hostile.attacks import ATTACKS
from tests.hostile.target import Target


def main(name: str, target: Target) -> None:
    """Attack until stdin ends."""
    attack = ATTACKS[name]
    threads = [threading.Thread(target=attack.run, args=(target,)) for _ in range(attack.threads)]
    for each in threads:
        each.start()
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    sys.stdin.read()
    target.stopped.set()
    for each in threads:
        each.join()


if __name__ == "__main__":
    main(sys.argv[1], Target.from_json(sys.argv[2]))
