"""Options of the HTTP listeners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of a server's HTTP listeners.

    Attributes:
        open_metrics: whether ``/metrics`` needs no token, even if the server requires tokens.
        identities: number of identities with series of their own in the metrics.
        hosts: names under which browsers reach the console, besides addresses and ``localhost``.
    """

    open_metrics: bool = False
    identities: int = 0
    hosts: frozenset[str] = frozenset()
