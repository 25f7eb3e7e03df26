"""``redis://``, ``rediss://``, ``redis+unix://``, ``redis+sentinel://``: one Redis or Valkey.

The keys of Redis are the truth. Each operation is one script, one round trip; time is Redis's own.
Who is granted is told by a message to the one engine whose session it is. What cannot be heard is
looked up, after a gap and every few seconds.

From the bottom up: ``url`` says where the server is, ``scripts`` what it runs (``lua/``), ``wire``
is one connection and ``commands`` what goes over it, ``connecting`` how one comes about, ``link``
that there is one again when it breaks; ``renewing`` and ``confirming`` have connections of their
own, for what must not wait. ``engine`` and ``session`` fulfil the contract, upon ``administration``
and ``attachment``, with ``attaching``, ``operations`` and ``describe``.

Rules:

* All keys of a namespace have one hash tag, its prefix. Each key of a session or a request has an
  owner who ends it, or a time to live.
* What a session asks for in one go is one script, which does it in order; one that fails leaves the
  others alone.
* Every command of a session has the token of its attachment, and is refused with an older one.
  After a gap sessions are attached anew first, under new tokens, and then what was not answered is
  sent again: requests are known by their holds, changes by their numbers, so nothing is done twice.
* Whatever a script meets that has run out it ends, in the order in which it ran out.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenure.clock import Clock
from tenure.engines.contract import Engine, Finding
from tenure.errors import Unsupported

__all__ = ["connect", "diagnose"]


def connect(url: str, clock: Clock) -> Engine:
    """The connector of ``redis://`` and its relatives.

    Raises:
        InvalidArgument: there is something wrong with the URL.
        Unsupported: the extra ``tenure[redis]`` is not installed.
    """
    _check_installed()
    from tenure.engines.redis.engine import RedisEngine
    from tenure.engines.redis.url import parse

    return RedisEngine(parse(url), clock)


def diagnose(url: str) -> Iterable[Finding]:
    """What `tenure doctor` looks at when it is given such a URL."""
    _check_installed()
    from tenure.engines.redis.doctor import examine

    return examine(url)


def _check_installed() -> None:
    try:
        import hiredis  # noqa: F401  only to see whether it is there
    except ImportError as error:
        raise Unsupported(
            "redis:// needs the package hiredis; pip install 'tenure[redis]'"
        ) from error
