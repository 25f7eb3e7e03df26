"""Attaching of sessions, from the arguments of `Client.session` to the attached session.

The engine attaches a session in a task that the client owns (`tasks`). If the caller is cancelled
meanwhile, a new session is closed as soon as it is attached; a session that was taken over is
detached.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tenure._client.client_core import ClientCore
from tenure._client.contact import shortened
from tenure._client.handles import CallSite, call_site
from tenure._client.loss import OnLoss, check_policy
from tenure._client.once import Once
from tenure._client.resume import ResumeToken, new_key
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure._client.source import ClientAnchor, SessionAnchor
from tenure._client.tasks import failure_of
from tenure.core import rules
from tenure.durations import Duration, seconds
from tenure.engines.contract import Attach
from tenure.errors import EngineUnavailable, InvalidArgument, TenureError, Unsupported
from tenure.identity import described
from tenure.model import DEFAULT_NODE


class SessionOptions(NamedTuple):
    """Arguments of `Client.session`, checked."""

    how: Attach
    on_loss: OnLoss
    max_stall: float

    @classmethod
    def of(
        cls,
        path: str,
        recovery_window: Duration,
        description: str,
        on_loss: OnLoss,
        max_stall: Duration | None,
    ) -> SessionOptions:
        """Check the arguments of `Client.session`, and return them."""
        rules.check_path(path)
        window = seconds(recovery_window, "a recovery window")
        rules.check_window(window, path)
        rules.check_description(description, path)
        check_policy(on_loss)
        stall = 2 * window if max_stall is None else seconds(max_stall, "max_stall")
        return cls(Attach(path, window, description), on_loss, stall)

    def resumable(self) -> SessionOptions:
        """Return these arguments for a session that survives its program."""
        return self._replace(how=replace(self.how, liveness="window", key=new_key()))

    def resuming(self, token: ResumeToken, *, assume_dead: bool) -> SessionOptions:
        """Return the arguments for taking over the session of that token."""
        node = self.how.node
        if node not in {DEFAULT_NODE, token.node}:
            raise InvalidArgument(
                f"the session to resume is on {token.node}, not on {node}: leave the path out",
                node=node,
            )
        how = Attach(
            token.node,
            token.recovery_window,
            liveness="window",
            key=token.key,
            session_id=token.session_id,
            assume_dead=assume_dead,
        )
        return self._replace(how=how)


def attach(client: ClientAnchor, options: SessionOptions) -> Once[Session]:
    """Return a session to be awaited or entered: a new one, or one that is taken over."""
    node = options.how.node
    if options.how.liveness == "window" and not client.core.capabilities.resume:
        raise Unsupported(
            f"{client.core.url} has no sessions that can be resumed; "
            "sqlite://, redis://, postgresql://, etcd:// and tenure:// have",
            node=node,
        )
    return Once(f"the session on {node}", attach_anchored, client, options, call_site())


async def attach_anchored(
    anchor: ClientAnchor, options: SessionOptions, site: CallSite | None
) -> Session:
    """Attach a session, and return the program's handle.

    Args:
        anchor: keeps the client.
        options: the arguments of `Client.session`.
        site: the program's call; ``None`` for a session that the program never gets.
    """
    try:
        core = await _attach_core(anchor.core, options)
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error
    if site is not None and core.debug:
        site = call_site(debug=True, otherwise=site)
    return Session(SessionAnchor(core, anchor, site))


async def _attach_core(client: ClientCore, options: SessionOptions) -> SessionCore:
    await client.opened()
    attaching = client.tasks.begin(_attach_now(client, options))
    try:
        return await client.outcome(attaching)
    except (asyncio.CancelledError, GeneratorExit):
        there_before = options.how.session_id is not None
        client.soon(partial(_abandon, attaching, detach=there_before))
        raise


async def _attach_now(client: ClientCore, options: SessionOptions) -> SessionCore:
    core = SessionCore(client, *options)
    description = described(options.how.description, client.identity)
    how = replace(options.how, description=description)
    core.start(await client.engine.attach(how, core))
    if not core.is_proven():
        raise EngineUnavailable(
            f"attaching a session on {core.node} took longer than it lives without contact: "
            f"{core.why}",
            node=core.node,
        )
    client.keep_session(core)
    return core


def _abandon(attaching: asyncio.Task[SessionCore], *, detach: bool) -> None:
    """Close the session as soon as it is attached: the caller was cancelled."""
    attaching.add_done_callback(partial(_end_at_once, detach=detach))
    attaching.cancel()


def _end_at_once(attaching: asyncio.Task[SessionCore], *, detach: bool) -> None:
    if failure_of(attaching) is None:
        attaching.result().close_soon(detach=detach)
