"""Errors for operations that dflockd's protocol does not have."""

from __future__ import annotations

from tenure.errors import Unsupported

__all__ = ["cannot"]


def cannot(what: str, node: str | None = None, name: str | None = None) -> Unsupported:
    """The error for what dflockd's protocol has no words for."""
    return Unsupported(
        f"dflockd:// cannot {what}; sqlite://, redis:// and tenure:// can",
        node=node,
        name=name,
    )
