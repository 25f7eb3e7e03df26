"""Ports of other libraries' locks, on the same keys, so that programs can share them.

They give the guarantees of those libraries, no more; `docs/how-to/interop.md` lists them.
`exclusive_lock` and `effect` keep their locks in Redis, without a queue or fencing tokens, through
a client of redis-py (``tenure[interop]``). `dflockd` is built from tenure's primitives on
``dflockd://``.
"""

from __future__ import annotations

__all__: list[str] = []
