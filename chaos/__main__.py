"""``python -m chaos run`` does chaos to an engine; ``python -m chaos check`` looks again.

Exit status: 0 when the run passed, 1 when promises were broken or processes failed, 2 when it was
asked for wrongly, 3 when there were too few acquisitions for the run to count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from chaos.adapter import Engine
from chaos.dflockd import Dflockd
from chaos.etcd import Etcd
from chaos.postgresql import PooledPostgresql, Postgresql
from chaos.redis import Redis, RedisInMemory, RedisLossy
from chaos.redis_cluster import RedisCluster
from chaos.report import Report, examine
from chaos.runner import Plan, run
from chaos.served import OverYdb, Served, in_front_of
from chaos.sqlite import PortableSqlite, Sqlite

_STORES: tuple[type[Engine], ...] = (Postgresql, Redis, Etcd)
_SERVERS: tuple[type[Served], ...] = (Served, OverYdb, Dflockd)
_ALL: tuple[type[Engine], ...] = (
    Sqlite,
    PortableSqlite,
    *_STORES,
    RedisInMemory,
    RedisLossy,
    RedisCluster,
    PooledPostgresql,
    *_SERVERS,
    *(in_front_of(store, server) for server in _SERVERS for store in _STORES),
)

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in _ALL}
"""The engines that chaos can be done to, by name."""


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    asked = _parser().parse_args(arguments)
    if asked.command == "check":
        try:
            report = examine(asked.folder)
        except FileNotFoundError:
            print(f"chaos: {asked.folder} is no folder of a run that ended", file=sys.stderr)
            return 2
        return _tell(report, as_json=asked.json)
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="tenure-chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "engine"
    store.mkdir()
    plan = Plan(
        seconds=asked.seconds,
        seed=asked.seed,
        processes=asked.processes,
        faults=tuple(asked.faults.split(",")) if asked.faults else (),
    )
    print(
        f"chaos for {plan.seconds:g} s on {asked.engine}, seed {plan.seed}; histories: {folder}",
        file=sys.stderr,
    )
    try:
        asyncio.run(run(ENGINES[asked.engine](store), plan, folder))
    except ValueError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    return _tell(examine(folder), as_json=asked.json)


def _tell(report: Report, *, as_json: bool) -> int:
    print(report.to_json() if as_json else report.to_text())
    if report.passed:
        return 0
    return 1 if report.violations or report.failures else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Chaos on the real thing.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="start processes, break things, check the histories")
    running.add_argument("--engine", choices=sorted(ENGINES), default="sqlite")
    running.add_argument("--seconds", type=float, default=60.0, help="of faults (default 60)")
    running.add_argument("--seed", type=int, help="of all choices (default: new)")
    running.add_argument("--processes", type=int, default=5, help="how many (default 5)")
    running.add_argument("--faults", default="", help="only these, separated by commas")
    running.add_argument("--folder", type=Path, help="for the histories (default: a new one)")
    checking = commands.add_parser("check", help="check the histories of a run again")
    checking.add_argument("folder", type=Path)
    for command in (running, checking):
        command.add_argument("--json", action="store_true", help="for scripts")
    running.set_defaults(seed=time.time_ns() % 1_000_000)
    return parser


if __name__ == "__main__":
    sys.exit(main())
