"""`tenure backup` and `tenure restore`: copy a store, and make a store from a copy."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from tenure import Unsupported
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import a_span, json_option, url_option
from tenure.cli.output import duration, print_json, safe, say
from tenure.cli.store import check_there, chosen_url, shown_url
from tenure.engines import split_client_parameters

_SERVER = (
    "run it beside the server, on the file that it serves ('tenure serve' logs it as store=...): "
    "tenure {command} --url sqlite:///FILE; "
)
_BACKUP_OF_SERVER = _SERVER + "the server may run meanwhile"
_RESTORE_OF_SERVER = _SERVER + "the server must be stopped for it"
_REDIS = "Redis has its own: 'redis-cli --rdb FILE', or a copy of its append-only file"
_POSTGRESQL = (
    "PostgreSQL has its own: 'pg_dump' and 'pg_restore' for a database, or 'pg_basebackup' for all "
    "of a server"
)
_ETCD = "etcd has its own: 'etcdctl snapshot save FILE', and 'etcdutl snapshot restore FILE'"
_YDB = "YDB has its own: 'ydb tools dump' and 'ydb tools restore'"
_DFLOCKD = "a dflockd server keeps its locks in memory only"
_OWN_TOOLS = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+cluster": _REDIS,
    "redis+sentinel": _REDIS,
    "redis+unix": _REDIS,
    "postgresql": _POSTGRESQL,
    "postgres": _POSTGRESQL,
    "etcd": _ETCD,
    "etcds": _ETCD,
    "ydb": _YDB,
    "ydbs": _YDB,
    "dflockd": _DFLOCKD,
    "dflockds": _DFLOCKD,
}
_SERVERS = ("tenure", "tenures", "tenure+unix")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
@url_option
def backup(file: str, *, force: bool, as_json: bool) -> None:
    """Write a backup of the store into FILE.

    For SQLite files. Programs and a server may use the store meanwhile. The backup is a consistent
    snapshot; it is checked, and FILE is either complete or not written. It contains the keys of
    sessions and all data, so only its owner can read it.

    For a server ('tenure://'), run it on the server's machine, on the file that it serves.
    """
    from tenure.engines.sqlite.restore import backup as write

    url = _sqlite_url("backup", _BACKUP_OF_SERVER)
    check_there(url)
    path, size = write(url, file, force=force)
    if as_json:
        print_json({"store": shown_url(), "backup": path, "bytes": size})
    else:
        say(f"wrote {safe(path)} ({size:,} bytes), a backup of {safe(shown_url())}")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace the store if it exists.")
@click.option(
    "--quarantine",
    metavar="TIME",
    type=a_span,
    help="For how long nothing is granted (90, 30s, 5m): you know that no session had a longer "
    "recovery window, or that no holder is left.",
)
@json_option
@url_option
def restore(file: str, *, force: bool, quarantine: float | None, as_json: bool) -> None:
    """Make a store from the backup FILE.

    For SQLite files. Nodes, semaphores and their data are restored; sessions and their leases are
    not. First stop all programs that use the store, including the server.

    Holders of leases granted after the backup may still consider them held. So nothing is granted
    until the longest recovery window of any session has passed, counted from the first use of the
    store. If a store is replaced, its sessions determine that time; otherwise it is 30 minutes,
    unless --quarantine is given. Fencing tokens keep rising.
    """
    from tenure.engines.sqlite.restore import restore as read

    done = read(
        _sqlite_url("restore", _RESTORE_OF_SERVER), file, force=force, quarantine=quarantine
    )
    taken = datetime.fromtimestamp(done.saved_at, UTC)
    if as_json:
        print_json(
            {
                "store": shown_url(),
                "saved_at": taken.isoformat(timespec="seconds"),
                "quarantine": done.quarantine,
                "reason": done.reason,
                "moved": done.moved or None,
            }
        )
        return
    say(f"restored {safe(done.path)} as it was at {taken:%Y-%m-%d %H:%M:%S} UTC")
    if done.moved:
        say(f"the damaged store that was there is {safe(done.moved)} now")
    if done.quarantine:
        lasts = duration(done.quarantine)
        say(f"nothing is granted for {lasts} from its first use on: {done.reason}")
    else:
        say("there is no quarantine, as requested")


def _sqlite_url(command: str, of_server: str) -> str:
    """Return the chosen store, if it is a file.

    Raises:
        Mistake: it is a server; the store is the server's file.
        Unsupported: its database has its own tools.
    """
    url = split_client_parameters(chosen_url())[0]
    scheme = url.partition(":")[0].lower()
    if scheme == "sqlite":
        return url
    if scheme in _SERVERS:
        raise Mistake(
            Status.USAGE,
            f"'tenure {command}' works on files, not through a server: "
            + of_server.format(command=command),
        )
    own = _OWN_TOOLS.get(scheme, "use the tools of its store")
    raise Unsupported(f"'tenure {command}' works on sqlite:// files, not on {scheme}://; {own}")
