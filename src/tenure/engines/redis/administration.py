"""Scripts without an attached session: those that attach, and operations on nodes and stores."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands.attaching import TakenOver
from tenure.engines._kit.commands.engine import CommandEngine
from tenure.engines.contract import Attach
from tenure.engines.redis import values
from tenure.engines.redis.commands import SCRIPTS, Keys, LargeRead, Script, ScriptCall, Word, pack
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.engines.redis.session import RedisSession
from tenure.engines.redis.url import RedisUrl
from tenure.errors import InvalidArgument, TenureError

_CHANGES = frozenset({"create_node", "alter_node", "drop_node", "end_session", "evict"})


class _AttachCall(ScriptCall):
    """Call that attaches, with the engine's known epoch at the time of sending."""

    __slots__ = ("_epoch",)

    def __init__(
        self,
        epoch: Callable[[], str],
        script: Script,
        args: tuple[Word, ...],
        answered: Callable[[Any], None],
    ) -> None:
        super().__init__(script, None, args, answered)
        self._epoch = epoch

    def packed(self, keys: Keys) -> bytes:
        return pack(("EVALSHA", self.script.digest, *keys, *self.args, self._epoch()))


class RedisAdministration(CommandEngine[RedisSession]):
    """Operations without an attached session.

    Attributes:
        channel: the channel of pushes to the engine's sessions.
        epoch: the epoch of the namespace, which changes with each loss of data.
        reconnector: the connection to the server.
    """

    channel: str
    epoch: str
    reconnector: RedisReconnector

    def __init__(self, address: RedisUrl, clock: Clock) -> None:
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address

    # Attaching

    def check_window(self, how: Attach) -> None:
        """Raise `InvalidArgument` if the window is invalid, or longer than the namespace allows."""
        super().check_window(how)
        longest = self._address.max_window
        if how.recovery_window > longest:
            raise InvalidArgument(
                f"{self.url}: a recovery window of {how.recovery_window:g} s is longer "
                f"than the longest one of the namespace, {longest:g} s. Write ?max_window="
                f"{how.recovery_window:g} in the URL of each program that uses the namespace",
                node=how.node,
            )

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        self._send_attach(
            "attach",
            (
                *(how.node, token, self.channel, int(how.recovery_window * 1e6)),
                *(how.description, how.liveness, how.key, rules.SESSIONS_PER_NODE),
            ),
            answered,
        )

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take over a session."""
        window = int(how.recovery_window * 1e6) if how.adopt else ""
        place = (how.node, number, secret, self.channel, how.key)
        self._send_attach("takeover", (*place, window), answered)

    def _send_attach(
        self, script: str, args: tuple[Word, ...], answered: Callable[[Any], None]
    ) -> None:
        self.reconnector.send(_AttachCall(lambda: self.epoch, SCRIPTS[script], args, answered))

    def read_take_over(self, number: int, reply: Any) -> TakenOver:  # noqa: ARG002
        """Decode the reply to a successful takeover."""
        return TakenOver(reply[1].decode(), reply[2] / 1e6, reply[3].decode())

    # Administration

    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Run a script."""
        if command == "describe":
            path, name, included = args
            words: tuple[Word, ...] = ("", path, included, *(() if name is None else (name,)))
            self.reconnector.send(LargeRead(SCRIPTS["describe"], None, words, answered))
            return
        words = tuple(map(_word, args))
        if command == "create_node":  # so that a repeated command recognises its own node
            words += (secrets.token_hex(8),)
        kind = ScriptCall if command in _CHANGES else LargeRead
        self.reconnector.send(kind(SCRIPTS["admin"], None, (command, *words), answered))

    def note_silence(self) -> TenureError | None:
        """Drop the connection; return the reason."""
        self.reconnector.drop("the server does not answer")
        return self.reconnector.failure

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        _, paths = await self.command("", "list_nodes", "")
        return sorted(path.decode() for path in paths)

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        _, microseconds = await self.command("", "store_time", "")
        return int(microseconds) / 1e6


def _word(argument: Any) -> Word:
    if isinstance(argument, bool):
        return int(argument)
    return argument if isinstance(argument, bytes) else str(argument)
