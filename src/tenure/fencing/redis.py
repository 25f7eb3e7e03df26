"""Fence for keys of Redis: a script that compares, records and writes in one step.

* One EVAL does all of it, and Redis runs nothing else meanwhile. Reading first and writing later is
  not offered, because it would not be atomic.
* The fence's key never expires. If it were removed, by a TTL, by eviction (``maxmemory-policy
  allkeys-*``) or by hand, an old token would be admitted again.
* Its hash tag is the resource, so that on a cluster the keys of the resource can be in the same
  slot: give them names that contain ``{resource}``.
* Nothing is imported: a client is an object with an `eval` like redis-py's. If that returns an
  awaitable, so does every method here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tenure.errors import InvalidArgument
from tenure.fencing.tokens import Token, name_of, stale, token_of

__all__ = ["RedisFence"]

Value = str | bytes | int | float
"""Types that a client sends unchanged."""

# Numbers below 2^53 are exact in Lua. The first key and argument belong to the fence, and are
# removed before the body runs. Its value is returned in a table, so that nil, an error and false
# are preserved.
_GUARD = """\
local fence = table.remove(KEYS, 1)
local token = table.remove(ARGV, 1)
local newest = redis.call('GET', fence)
if newest and tonumber(token) < tonumber(newest) then
  return {0, newest}
end
redis.call('SET', fence, token)
local result = (function()
%s
end)()
if type(result) == 'table' and result.err then
  return result
end
return {1, result}
"""

# For each command: its number of words, then the words without the key, which is in KEYS.
_COMMANDS = """\
local replies, at = {}, 1
for index, key in ipairs(KEYS) do
  local words = tonumber(ARGV[at])
  local command = {ARGV[at + 1], key}
  for word = 2, words do
    command[word + 1] = ARGV[at + word]
  end
  replies[index] = redis.call(unpack(command))
  at = at + words + 1
end
return replies"""


class RedisFence:
    """Fence that rejects late writes of holders whose token is no longer the newest.

    Example::

        from redis import Redis
        from tenure.fencing import RedisFence

        fence = RedisFence("report")
        async with session.mutex("report").lock() as lease:
            with Redis.from_url("redis://localhost") as redis:
                fence.write(redis, lease, ["SET", "{report}:body", "text"])

    It has no state of its own. With a client for asyncio, await the results of its methods.

    Args:
        resource: the name of the data that is written under one lock.
        prefix: prefix of the fence's key.

    Raises:
        InvalidArgument: one of them is not a name, or contains a brace, which would change the hash
            tag.
    """

    __slots__ = ("key", "resource")

    def __init__(self, resource: str, *, prefix: str = "tenure:fence:") -> None:
        """Set the resource and its key; Redis is not contacted."""
        self.resource = name_of(resource)
        if set("{}") & set(self.resource + name_of(prefix)):
            raise InvalidArgument(
                f"no brace may be in {self.resource!r} and {prefix!r}: the key's hash tag has them"
            )
        self.key = f"{prefix}{{{resource}}}"

    def __repr__(self) -> str:
        """Return the resource and its key, for people."""
        return f"<{type(self).__name__} {self.resource!r} at {self.key}>"

    def write(self, client: Any, token: Token, *commands: Sequence[Value]) -> Any:
        """Run commands in order, unless a newer token has written before.

        A command that fails in Redis ends the script, but does not undo the commands before it.

        Args:
            client: a client of redis-py, or one with a compatible `eval`.
            token: the lease that protects the write, or its fencing token.
            commands: lists of the command's name, its only key, and its other arguments. Use a
                script with `run` for other commands.

        Returns:
            The replies, in order, as Redis returns them to a script.

        Raises:
            StaleToken: a newer token was admitted before; nothing is written.
            InvalidArgument: it is not a token, or not a command.
        """
        if not commands:
            raise InvalidArgument(f"there is no command to write to {self.resource!r} with")
        keys: list[Value] = []
        words: list[Value] = []
        for command in commands:
            if isinstance(command, str | bytes) or len(command) < 2:
                raise InvalidArgument(
                    f"a command is a list of its name, its key and its arguments, not {command!r}"
                )
            name, key, *arguments = command
            keys.append(key)
            words += [1 + len(arguments), name, *arguments]
        return self.run(client, token, _COMMANDS, keys=keys, args=words)

    def run(
        self,
        client: Any,
        token: Token,
        body: str,
        *,
        keys: Sequence[Value] = (),
        args: Sequence[Value] = (),
    ) -> Any:
        """Run a Lua script, unless a newer token has written before.

        Args:
            client: a client of redis-py, or one with a compatible `eval`.
            token: the lease that protects the write, or its fencing token.
            body: as for EVAL; its KEYS and ARGV are `keys` and `args`. Use the same text for every
                call, with changing values in `args`: Redis caches every script.
            keys: every key that the script accesses.
            args: the other arguments.

        Returns:
            The script's result.

        Raises:
            StaleToken: a newer token was admitted before; the script has not run.
            InvalidArgument: it is not a token.
        """
        number = token_of(token)
        reply = client.eval(_GUARD % body, 1 + len(keys), self.key, *keys, number, *args)

        def opened(reply: Any) -> Any:
            admitted, *rest = reply
            if not admitted:
                raise stale(self.resource, number, int(rest[0]))
            return rest[0] if rest else None

        return _then(reply, opened)

    def newest(self, client: Any) -> Any:
        """Return the newest token that was admitted, an int; ``None`` before the first."""
        return _then(
            client.eval("return redis.call('GET', KEYS[1])", 1, self.key),
            lambda reply: None if reply is None else int(reply),
        )


def _then(reply: Any, follow: Callable[[Any], Any]) -> Any:
    """Process a reply now, or when it is awaited if it is an awaitable."""
    if inspect.isawaitable(reply):
        return _awaited(reply, follow)
    return follow(reply)


async def _awaited(reply: Awaitable[Any], follow: Callable[[Any], Any]) -> Any:
    return follow(await reply)
