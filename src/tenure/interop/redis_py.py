"""Imports from redis-py for the ports, or an error that says how to install it."""

from __future__ import annotations

from typing import Any

from tenure.errors import InvalidArgument

try:
    import redis
    from redis.asyncio import Redis
    from redis.exceptions import AuthenticationError, RedisError
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError
except ImportError as error:
    raise ImportError(
        "locks that are shared in Redis need redis, which is not installed; install it with: "
        "pip install 'tenure[interop]'"
    ) from error

__all__ = ["FAILURES", "Redis", "check_client", "what_to_do"]

FAILURES = (RedisError, OSError)
"""Errors by which redis-py reports a failure of Redis or its connection."""


def check_client(client: Any) -> None:
    """Raise `InvalidArgument` unless the argument is a client for asyncio."""
    blocks = isinstance(client, redis.Redis | redis.RedisCluster)
    if blocks or not callable(getattr(client, "eval", None)):
        raise InvalidArgument(
            "the client must be one for asyncio, a redis.asyncio.Redis, not a "
            f"{type(client).__module__}.{type(client).__name__}; for threads, there is "
            "tenure.interop.blocking"
        )


def what_to_do(error: Exception) -> str:
    """Return a hint for an error message if Redis may be unreachable, else ""."""
    unreached = isinstance(error, RedisConnectionError | RedisTimeoutError | OSError)
    # redis-py reports a wrong password as a failure to connect.
    refused = isinstance(error, AuthenticationError) or isinstance(
        error.__cause__, AuthenticationError
    )
    return " (is Redis there?)" if unreached and not refused else ""
