"""Ports of other libraries' locks, onto the same keys: a program can share them with theirs.

They hold what those libraries hold, no more: no queue, no fencing token, and a time to live that
somebody has to refresh. `docs/interop.md` says of each what is safe, and beside whom.

They are made of a Redis client in the manner of redis-py (``tenure[redis]``).
"""

from __future__ import annotations

__all__: list[str] = []
