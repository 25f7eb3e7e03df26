"""Run mutation testing, and write docs/evidence/mutation.md of what came of it.

python -m tests.mutation [GROUP...]             every mutant of these groups, or of all
python -m tests.mutation GROUP --sample 40      that many of each module, drawn from --seed
python -m tests.mutation GROUP --survivors      those again that survived the last run
python -m tests.mutation --write                run nothing, write the document anew
"""

from __future__ import annotations

import argparse
import sys

from tests.mutation.document import write
from tests.mutation.groups import groups
from tests.mutation.run import run, run_survivors


def main() -> int:
    known = groups()
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("group", nargs="*", help=", ".join(known))
    parser.add_argument("--sample", type=int, help="mutants of each module; all, if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    unknown = set(options.group) - set(known)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not options.write:
        for name in options.group or known:
            if options.survivors:
                run_survivors(known[name], workers=options.workers)
            else:
                run(known[name], sample=options.sample, seed=options.seed, workers=options.workers)
    return write()


if __name__ == "__main__":
    sys.exit(main())
