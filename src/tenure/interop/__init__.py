"""Ports of other libraries' locks, onto the same keys: a program can share them with theirs.

They hold what those libraries hold, no more. `docs/how-to/interop.md` says of each what is safe,
and beside which programs. `exclusive_lock` and `effect` keep their locks in Redis, with no queue
and no fencing token, through a client in the manner of redis-py (``tenure[interop]``). `dflockd` is
built from tenure's primitives on ``dflockd://``.
"""

from __future__ import annotations

__all__: list[str] = []
