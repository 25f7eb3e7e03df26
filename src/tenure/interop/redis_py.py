"""What the ports use of redis-py, or an error that says how to install it."""

from __future__ import annotations

try:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError
except ImportError as error:
    raise ImportError(
        "locks that are shared in Redis need the package redis; pip install 'tenure[redis]'"
    ) from error

__all__ = ["Redis", "RedisError"]
