"""The agents of all threads that call one portal.

A thread has one agent, and another for each call that a signal handler makes during a call.
Rules:

* An agent is made in the thread that calls, and dismissed on the loop once the thread has ended.
* Python handles a signal between two instructions of the main thread, and a system call is ended
  by one that comes during it. A signal just before the call waits for its end. So the main thread
  is reminded while it waits, every `REMINDER` seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tenure.background import BackgroundTimer, Failures
from tenure.blocking.agent import Agent, Call

__all__ = ["REMINDER", "Agents", "ThreadAgents"]

REMINDER = 1.0
"""Seconds after which the main thread, if it waits, looks for signals again."""


class ThreadAgents:
    """The agents of one thread.

    Args:
        hire: makes an agent.
        retire: called with each agent once the thread has ended.

    Attributes:
        free: agents without a call; the last of them takes the next.
    """

    def __init__(self, hire: Callable[[], Agent], retire: Callable[[Agent], None]) -> None:
        """Start without agents; `hire` makes one and `retire` ends one."""
        self._hire = hire
        self._retire = retire
        self._all: list[Agent] = []
        self.free: list[Agent] = []

    def next(self) -> Agent:
        """Return the agent of the next call; it stays among the free ones."""
        if not self.free:
            agent = self._hire()
            self._all.append(agent)
            self.free.append(agent)
        return self.free[-1]

    def __del__(self) -> None:
        """Retire the agents of a thread that has ended."""
        # The thread has ended; or this was interrupted while it was made.
        for agent in getattr(self, "_all", ()):
            self._retire(agent)


class _Thread(threading.local):
    agents: ThreadAgents | None = None


class Agents:
    """All agents of one loop.

    Args:
        loop: the loop that their tasks run on.
        finished: called with each call that is over.
        post: has a function called on the loop, from any thread.
        failures: reports what goes wrong in a reminder.

    Attributes:
        all: the agents.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Call], None],
        post: Callable[..., None],
        failures: Failures,
    ) -> None:
        """Start without agents on `loop`."""
        self.all: set[Agent] = set()
        self._loop = loop
        self._finished = finished
        self._post = post
        self._reminder = BackgroundTimer(loop, loop.time, self._remind, failures)
        self._local = _Thread()

    def mine(self) -> ThreadAgents:
        """Return the agents of the calling thread."""
        mine = self._local.agents
        if mine is None:
            mine = self._local.agents = ThreadAgents(self._new, self._retire)
        return mine

    def task(self) -> asyncio.Task[None] | None:
        """Return the task of the calling thread's free agent, if it has one."""
        mine = self._local.agents
        return mine.free[-1].task if mine is not None and mine.free else None

    def forget(self) -> None:
        """In a forked child: leave the tasks to the parent."""
        for agent in self.all:
            agent.forget()

    def stop(self) -> list[asyncio.Task[None]]:
        """End all of them, and their calls; returns the tasks that end."""
        for agent in self.all:
            agent.stop()
        return [agent.task for agent in self.all if agent.task is not None]

    def _new(self) -> Agent:
        in_main = threading.current_thread() is threading.main_thread()
        agent = Agent(self._finished, self._remind_later if in_main else None)
        self.all.add(agent)
        return agent

    def _retire(self, agent: Agent) -> None:
        self._post(self._dismiss, agent)

    def _dismiss(self, agent: Agent) -> None:
        agent.end()
        self.all.discard(agent)
        agent.bell.close()  # here, because it is here that it is rung

    def _remind_later(self) -> None:
        if not self._reminder.armed:
            self._reminder.by(self._loop.time() + REMINDER)

    def _remind(self) -> None:
        """Have the main thread, if it waits, handle the signals that came as it began to wait."""
        reminded = [agent for agent in self.all if agent.remind()]
        if reminded:
            self._remind_later()
