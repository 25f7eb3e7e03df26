"""The fence before keys of Redis: a script that compares, remembers and writes in one step.

* One EVAL does all of it: Redis runs nothing else meanwhile. There is no way to read first and
  write later, because that would be no fence.
* The fence's key never expires. Were it to go, by a TTL, by an eviction (``maxmemory-policy
  allkeys-*``) or by hand, an old token would be admitted again.
* Its name has the resource as its hash tag, so that on a cluster the keys of the resource can be
  beside it: name them with ``{resource}`` inside.
* Nothing is imported: a client is what has `eval`, in the manner of redis-py. Where that gives an
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
"""What a client sends as it is."""

# Numbers below 2^53 are exact in Lua. The first key and argument are the fence's, and gone when the
# body runs; its value is inside a table, so that nil, an error and false are returned as they are.
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

# Each command: how many words it has, then these, but for its key, which is in KEYS.
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
    """Fence that refuses the late write of a holder whose token is no longer the newest.

    Example::

        from redis import Redis
        from tenure.fencing import RedisFence

        fence = RedisFence("report")
        async with session.mutex("report").lock() as lease:
            with Redis.from_url("redis://localhost") as redis:
                fence.write(redis, lease, ["SET", "{report}:body", "text"])

    It has no state of its own. With a client for asyncio, await what its methods give.

    Args:
        resource: what is written to under one lock has one name.
        prefix: what the fence's key begins with.

    Raises:
        InvalidArgument: one of them is no name, or has a brace inside, which cluster would misread.
    """

    __slots__ = ("key", "resource")

    def __init__(self, resource: str, *, prefix: str = "tenure:fence:") -> None:
        """Name the resource and its key; Redis is not contacted."""
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
        """Run commands one after the other, unless a newer token has written before.

        A command that Redis finds wrong ends the script, but undoes nothing that came before it.

        Args:
            client: of redis-py, or what has an `eval` as it does.
            token: the lease under which this is written, or its fencing token.
            commands: each a list of the command's name, the one key that it is about, and its other
                arguments. What is not of this form goes into a script for `run`.

        Returns:
            Their replies, in order, as Redis gives them to a script.

        Raises:
            StaleToken: a newer token was admitted before; nothing is written.
            InvalidArgument: it is no token, or no command.
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
            client: of redis-py, or what has an `eval` as it does.
            token: the lease under which this is written, or its fencing token.
            body: as for EVAL; its KEYS and ARGV are `keys` and `args`. Let it stay the same from
                call to call, and give what changes in `args`: Redis keeps every script.
            keys: every key that it touches.
            args: what else it needs.

        Returns:
            What the script returns.

        Raises:
            StaleToken: a newer token was admitted before; the script has not begun.
            InvalidArgument: it is no token.
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
    """Process a reply now, or, if it is an awaitable, when it is awaited."""
    if inspect.isawaitable(reply):
        return _awaited(reply, follow)
    return follow(reply)


async def _awaited(reply: Awaitable[Any], follow: Callable[[Any], Any]) -> Any:
    return follow(await reply)
