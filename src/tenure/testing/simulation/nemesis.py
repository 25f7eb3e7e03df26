"""Injection of a plan's faults into a simulated world, and their repair.

Each fault is carried out at its time, or somewhat later if it has no target yet; only faults that
took effect count. A fault of a process affects its current incarnation. It is recorded in the
history before or after it takes effect, so that the record is conservative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tenure._client.client import client_core
from tenure._client.semaphore import name_of_key
from tenure.engines.contract import Engine, EngineSession
from tenure.errors import SemaphoreNotFound
from tenure.model import DEFAULT_NODE
from tenure.testing.faults import Way, at_once
from tenure.testing.history import Called, Continued, Crashed, Paused, Returned, Revokes
from tenure.testing.simulation.plan import KEYS, LIMIT, Fault, FaultKind
from tenure.testing.simulation.process import Incarnation, SimulatedProcess, Surroundings
from tenure.testing.simulation.scheduler import ProcessLoop

TRIALS, BETWEEN_TRIALS = 20, 0.2
"""Number of retries of a fault that finds no target, and the seconds between them."""


class Targets(Surroundings, Protocol):
    """Parts of a world that faults affect.

    Attributes:
        eye: a connection to the store without a session.
        administrator: a session that no fault ends.
        server: the store's loop.
    """

    processes: Sequence[SimulatedProcess]
    eye: Engine
    administrator: EngineSession
    server: ProcessLoop


class Nemesis:
    """Injector of the faults of one world.

    Attributes:
        applied: the number of faults that took effect, by kind.
        observers_way: the observer's way, which a restart of the store breaks too.
    """

    def __init__(self, world: Targets) -> None:
        self.applied: Counter[FaultKind] = Counter()
        self._pending = 0  # faults to come, and ends of faults to come
        self.observers_way: Way
        self._world = world
        self._scheduler = world.scheduler
        self._record = world.records.append

    @property
    def idle(self) -> bool:
        """True if no fault is scheduled or in effect."""
        return not self._pending

    def begin(self, faults: Sequence[Fault]) -> None:
        """Schedule the faults, relative to now."""
        start = self._scheduler.now
        self._pending = len(faults)
        for fault in faults:
            self._scheduler.call_at(start + fault.at, self._happen, fault, TRIALS)

    def _happen(self, fault: Fault, trials: int) -> None:
        carry_out: Callable[[Fault], bool] = getattr(self, f"_{fault.kind}")
        try:
            befell = carry_out(fault)
        except Exception as error:  # an administrator's call on the store failed
            self._world.complain("nemesis", f"{fault.kind} raised {error!r}")
            befell = True
        if befell:
            self.applied[fault.kind] += 1
        elif trials:
            again = self._scheduler.now + BETWEEN_TRIALS
            self._scheduler.call_at(again, self._happen, fault, trials - 1)
            return
        self._pending -= 1
        self._world.look_whether_done()

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        """Schedule the end of a fault, in seconds from now."""
        self._pending += 1

        def happen() -> None:
            self._pending -= 1
            act()
            self._world.look_whether_done()

        self._scheduler.call_at(self._scheduler.now + seconds, happen)

    # Processes

    def _living(self, fault: Fault) -> Incarnation | None:
        """Return the incarnation that a fault affects, if it is alive and not done."""
        life = self._world.processes[fault.process].now
        return life if life.loop.alive and not life.done else None

    def _pause(self, fault: Fault) -> bool:
        life = self._living(fault)
        if life is None:
            return False
        life.loop.interrupt_after(fault.which % 4, partial(self._stop, life, fault.length))
        return True

    def _stop(self, life: Incarnation, length: float) -> None:
        """Pause all loops of an incarnation for some seconds."""
        self._record(Paused(self._scheduler.now, life.label))
        life.loop.pause()
        if life.io_loop is not None:
            life.io_loop.pause()
        self._later(length, partial(self._go_on, life))

    def _go_on(self, life: Incarnation) -> None:
        if life.io_loop is not None:
            life.io_loop.resume()
        self._wake(life)

    def _wake(self, life: Incarnation) -> None:
        if life.loop.alive:
            life.loop.resume()
            self._record(Continued(self._scheduler.now, life.label))

    def _stall(self, fault: Fault) -> bool:
        """Stall the event loop; the threads of the keeper and of the engine continue."""
        life = self._living(fault)
        if life is None or life.client is None:
            return False
        self._record(Paused(self._scheduler.now, life.label))
        life.loop.pause()
        over = self._scheduler.now + fault.length
        self._keep(life, over)
        self._later(fault.length, partial(self._wake, life))
        return True

    def _keep(self, life: Incarnation, until: float) -> None:
        """Do the work of the keeper's thread until an instant of true time."""
        client = life.client
        core = None if client is None else client_core(client)
        if core is None or core.loop is None or not life.loop.alive:
            return
        if self._scheduler.now >= until:
            return
        pause = core.keeper.watch_over()
        self._scheduler.call_at(self._scheduler.now + pause, self._keep, life, until)

    def _crash(self, fault: Fault) -> bool:
        life = self._living(fault)
        if life is None:
            return False
        self._record(Crashed(self._scheduler.now, life.label))
        process = self._world.processes[fault.process]
        process.die(noticed=bool(fault.which & 1))
        resume = life.token if fault.which & 2 else None
        self._later(fault.length, partial(process.start, resume))
        return True

    def _cancel(self, fault: Fault) -> bool:
        life = self._living(fault)
        doing = [] if life is None else [each for each in life.doing if each is not None]
        if not doing:
            return False
        task, request = doing[fault.which % len(doing)]
        if request is not None:
            request.leaves()
        task.cancel()
        return True

    def _wall(self, fault: Fault) -> bool:
        world = self._world
        clock = (world.server if fault.which & 1 else world.processes[fault.process]).clock
        clock.jump_wall((fault.length - 1.0) * 3600.0)
        return True

    # The ways to the store, and the store

    def _break(self, fault: Fault, breaking: Callable[[Way], None]) -> bool:
        life = self._living(fault)
        if life is None:
            return False
        process = self._world.processes[fault.process]
        process.broken += 1
        breaking(life.way)
        self._later(fault.length, partial(self._mend, process))
        return True

    def _mend(self, process: SimulatedProcess) -> None:
        process.broken -= 1
        if not process.broken:
            process.now.way.mend()

    def _cut(self, fault: Fault) -> bool:
        there, back = ((True, True), (True, False), (False, True))[fault.which % 3]
        return self._break(fault, lambda way: way.cut(there=there, back=back))

    def _lose(self, fault: Fault) -> bool:
        return self._break(fault, Way.lose)

    def _slow(self, fault: Fault) -> bool:
        process = self._world.processes[fault.process]
        process.slow *= 10.0
        self._later(fault.length, partial(self._speed_up, process))
        return True

    def _speed_up(self, process: SimulatedProcess) -> None:
        process.slow /= 10.0

    def _restart(self, fault: Fault) -> bool:
        self._world.server.pause()
        self.observers_way.lose()
        for each in self._world.processes:
            each.broken += 1
            each.now.way.lose()
        self._later(fault.length, self._come_back)
        return True

    def _come_back(self) -> None:
        self._world.server.resume()
        self.observers_way.mend()
        for each in self._world.processes:
            self._mend(each)

    # Administrators

    def _evict(self, fault: Fault) -> bool:
        eye = self._world.eye
        found = [
            (each.name, request)
            for each in at_once(eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True))
            for request in (*each.owners, *each.waiters)
        ]
        if not found:
            return False
        name, request = found[fault.which % len(found)]
        self._revoke(request.session_id, name)
        if name == "shared":  # its program releases the tokens of the key
            for key in KEYS:
                self._revoke(request.session_id, name_of_key(name, key))
        return at_once(eye.evict(DEFAULT_NODE, name, request.order_id))

    def _end(self, fault: Fault) -> bool:
        eye = self._world.eye
        found = [
            each
            for each in at_once(eye.list_sessions(DEFAULT_NODE))
            if each.description.startswith("p")
        ]
        if not found:
            return False
        session = found[fault.which % len(found)]
        self._revoke(session.id, None)
        return at_once(eye.end_session(DEFAULT_NODE, session.id))

    def _revoke(self, session_id: int, name: str | None) -> None:
        sessions = at_once(self._world.eye.list_sessions(DEFAULT_NODE))
        [description] = [each.description for each in sessions if each.id == session_id]
        number = description.removeprefix("p").partition(".")[0]
        for process in self._world.processes:
            if str(process.number) == number:  # any incarnation may have resumed the session
                for life in (*process.former, process.now):
                    self._record(Revokes(self._scheduler.now, None, life.label, DEFAULT_NODE, name))
                process.now.revoked = self._scheduler.now

    def _resize(self, fault: Fault) -> bool:
        limit = 1 + fault.which % (LIMIT + 2)
        call, at = f"resize-{self.applied['resize']}", self._scheduler.now
        argument = b"%d" % limit
        try:
            at_once(self._world.administrator.resize_semaphore("pool", limit))
        except SemaphoreNotFound:
            return False
        # It took no time, and its effects have not been delivered yet.
        self._record(Called(at, "administrator", call, DEFAULT_NODE, "pool", "resize", argument))
        self._record(Returned(at, call, "ok"))
        return True

    def _drop(self, fault: Fault) -> bool:
        found = [
            each.name
            for each in at_once(
                self._world.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False)
            )
            if each.name in {"a", "b", "pool", "leader"}
        ]
        if not found:
            return False
        name = found[fault.which % len(found)]
        self._record(Revokes(self._scheduler.now, None, None, DEFAULT_NODE, name))
        for process in self._world.processes:
            process.now.revoked = self._scheduler.now
        at_once(self._world.administrator.delete_semaphore(name, force=True))
        return True
