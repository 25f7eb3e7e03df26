"""``tenure://``: tenure's own server, over the native protocol.

`url` says what a URL may be. One program has one connection (`link`, `connection`), over which all
its sessions speak; what happens to them when it is lost is in `session`.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.native.url import parse
from tenure.errors import Unsupported

try:
    from tenure.engines.native.engine import NativeEngine
except ModuleNotFoundError as error:
    if error.name != "msgspec":
        raise
    raise Unsupported(
        "tenure:// needs the package msgspec; install it with: pip install 'tenure[native]'"
    ) from None

__all__ = ["NativeEngine", "connect"]


def connect(url: str, clock: Clock) -> NativeEngine:
    """The connector of ``tenure://``, ``tenures://`` and ``tenure+unix://``."""
    return NativeEngine(parse(url), clock)
