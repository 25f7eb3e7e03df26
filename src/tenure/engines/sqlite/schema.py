"""Tables of the store, and connections to it.

Objects are numbered, so that rows are small and the queue of a semaphore is contiguous:

* A *request* is an owner if ``granted_at`` is not null. Its order id is its place, and ``hold`` its
  number in its session, the ``request_id`` of the contract.
* A *lasting* semaphore has a row, with its held count. An *ephemeral* one has no row: it exists
  while there are requests for its name.
* ``durable`` is set if some program has requested ``durability=full``: every commit of every
  program waits for the disk, because one program's release is another one's grant.
* A *participant* is one open engine; it ends with its process. Events for it are in ``news`` until
  it has read them.
* ``identity`` is generated when a store is created, and copied to its backups. ``longest_window``
  is the longest recovery window of any session that it ever had. ``quarantine`` is the number of
  seconds that a restored store waits from its first opening, and ``quarantined_until`` their end on
  this boot's clock (`quarantine`). ``saved_at`` is the wall-clock time of a backup, 0 in a store.
* A *rate* has a row while it has tokens in its window, and for a while longer. ``seen`` is the time
  of its latest change, and ``expires`` the end of its window, in microseconds of this boot's clock.
* Limits and counts above 2^63-1 are texts, because SQLite's integers end there. They are never
  added in SQL.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from pathlib import Path

from tenure.core.rules import MAX_WINDOW
from tenure.engines.sqlite import files
from tenure.engines.sqlite.protection import users_of
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import AuthenticationFailed, EngineError, TenureError
from tenure.model import DEFAULT_NODE

APPLICATION_ID = 0x74656E75
PORTABLE_ID = 0x74656E70
"""Application id of a store in portable mode, so that no program opens one in native mode."""
BACKUP_ID = 0x74656E62
"""Application id of a backup, so that no program opens one as a store."""
VERSION = 4
_PAGE_SIZE = 1024  # rows are small: a commit writes a few pages of any size
_CHECKPOINT_PAGES = 16000  # the net under `checkpoint.Checkpointer`
DURABLE = "FULL"  # each commit syncs the log before it is visible; NORMAL never does
_BIG = 2**63
_OPENING = 1.0  # longest wait in seconds for another process that opens, recovers or closes it

_TABLES = """
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    boot TEXT NOT NULL,
    last_order_id INTEGER NOT NULL,
    last_session_id INTEGER NOT NULL,
    last_news_id INTEGER NOT NULL,
    watches INTEGER NOT NULL,
    durable INTEGER NOT NULL,
    identity TEXT NOT NULL,
    longest_window REAL NOT NULL,
    quarantine REAL NOT NULL,
    quarantined_until REAL NOT NULL,
    saved_at REAL NOT NULL
);
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,
    self_check_period REAL NOT NULL,
    session_grace_period REAL NOT NULL,
    read_consistency TEXT NOT NULL,
    attach_consistency TEXT NOT NULL,
    rate_limiter_counters_mode TEXT NOT NULL,
    sessions INTEGER NOT NULL
);
CREATE TABLE participants (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL
);
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    node INTEGER NOT NULL,
    participant INTEGER,
    slot INTEGER,
    recovery_window REAL NOT NULL,
    liveness TEXT NOT NULL,
    attach_number INTEGER NOT NULL,
    key BLOB NOT NULL,
    contact REAL NOT NULL,
    description TEXT NOT NULL
);
CREATE INDEX sessions_of_node ON sessions (node);
CREATE INDEX sessions_of_participant ON sessions (participant);
CREATE TABLE semaphores (
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    "limit" NOT NULL,
    held NOT NULL,
    whole INTEGER NOT NULL,
    PRIMARY KEY (node, name)
) WITHOUT ROWID;
CREATE TABLE contents (
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (node, name)
) WITHOUT ROWID;
CREATE TABLE requests (
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    order_id INTEGER NOT NULL,
    session INTEGER NOT NULL,
    hold INTEGER NOT NULL,
    count NOT NULL,
    joined_at REAL NOT NULL,
    granted_at REAL,
    deadline REAL,
    data BLOB NOT NULL,
    PRIMARY KEY (node, name, order_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX requests_of_session ON requests (session, hold);
CREATE INDEX waiting ON requests (node, name, order_id) WHERE granted_at IS NULL;
CREATE INDEX deadlines ON requests (deadline) WHERE deadline IS NOT NULL;
CREATE TABLE rates (
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    seen INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    state TEXT NOT NULL,
    PRIMARY KEY (node, name)
) WITHOUT ROWID;
CREATE INDEX rates_by_expiry ON rates (expires);
CREATE TABLE watches (
    node INTEGER NOT NULL,
    name TEXT NOT NULL,
    participant INTEGER NOT NULL,
    kinds INTEGER NOT NULL,
    PRIMARY KEY (node, name, participant)
) WITHOUT ROWID;
CREATE INDEX watches_of_participant ON watches (participant);
CREATE TABLE news (
    participant INTEGER NOT NULL,
    id INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    session INTEGER,
    hold INTEGER,
    order_id INTEGER,
    why TEXT,
    node INTEGER,
    name TEXT,
    PRIMARY KEY (participant, id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX changes ON news (participant, kind, node, name) WHERE name IS NOT NULL;
"""

_CONTENTS = (
    "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
    "FROM pragma_application_id, pragma_user_version"
)
"""Describes a file as of one moment.

Another program may create the tables meanwhile. It is one statement, because a transaction would
lock a new file until the program continues.
"""


def to_column(number: int) -> int | str:
    """Return a limit or a count in the form of a column."""
    return number if number < _BIG else str(number)


def from_column(value: int | str) -> int:
    """Return the limit or count in a column.

    Raises:
        EngineError: the file is damaged.
    """
    if type(value) is int:
        return value
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"the store is damaged: {value!r:.40} is not a number. Stop all programs that use it, "
            "then restore it from a backup"
        ) from error


def connect(address: SqliteUrl) -> sqlite3.Connection:
    """Open an existing file, and check that it is tenure's, or empty.

    Once open, it never waits for another process.

    Raises:
        EngineError: the file belongs to another program, or to a newer version. sqlite3.Error: it
        cannot be opened (`explain`).
    """
    until = time.monotonic() + _OPENING
    while True:
        try:
            return _connect(address)
        except sqlite3.Error as error:
            # If two programs enable the log of a new file, SQLite rejects one without waiting.
            if not is_busy(error) or time.monotonic() > until:
                raise
        except UnicodeDecodeError as error:  # SQLite's message quotes damaged bytes
            raise EngineError(
                f"{address.path} is damaged: it contains invalid text. Stop all programs that "
                "use it, then restore it from a backup"
            ) from error
        time.sleep(0.002)


def uri(path: str, mode: str) -> str:
    """Return SQLite's URI of a file, for opening it in a mode (``"ro"`` or ``"rw"``)."""
    return f"{Path(path).as_uri()}?mode={mode}"


def _connect(address: SqliteUrl) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri(address.path, "rw"),
        uri=True,
        timeout=_OPENING,
        isolation_level=None,
        check_same_thread=False,  # one thread at a time, ensured by the committer
        cached_statements=256,
    )
    try:
        for pragma in (
            f"synchronous = {DURABLE if address.durability == 'full' else 'NORMAL'}",
            "secure_delete = OFF",
            "trusted_schema = OFF",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        if not is_ready(connection, address.path, portable=address.portable):
            connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise EngineError(
                f"the file system of {address.path} cannot do what SQLite's write-ahead log needs "
                "(shared memory). Use a local folder"
            )
        # From its first read on, a connection keeps others from removing or rebuilding the log. So
        # this read may have to wait for them, and the later ones need not.
        is_ready(connection, address.path, portable=address.portable)
        connection.execute("PRAGMA busy_timeout = 0")
    except BaseException:
        connection.close()
        raise
    return connection


def application_id(*, portable: bool) -> int:
    """Return the application id of a store, which records its mode."""
    return PORTABLE_ID if portable else APPLICATION_ID


def other_mode(path: str, *, portable: bool) -> EngineError:
    """Return the error for a store in the other mode than this program's."""
    if portable:
        return EngineError(
            f"{path} is in native mode, and this program uses the portable mode. All programs of a "
            "store use one mode: open it without ?portable=true; where that is not possible "
            "(Windows), use another file. 'tenure backup' and 'tenure restore' move the content"
        )
    return EngineError(
        f"{path} is in portable mode, and this program uses the native mode. All programs of a "
        f"store use one mode: open it with ?portable=true (sqlite:///{path}?portable=true), or "
        "use another file. 'tenure backup' and 'tenure restore' move the content"
    )


def is_ready(connection: sqlite3.Connection, path: str, *, portable: bool) -> bool:
    """Return true if the file has the tables; false if it is empty, or of an earlier version.

    Raises:
        EngineError: it belongs to another program, to a newer version, or is in the other mode.
    """
    ((application, version, tables),) = connection.execute(_CONTENTS).fetchall()
    if application == application_id(portable=not portable):
        raise other_mode(path, portable=portable)
    if application == application_id(portable=portable):
        if version > VERSION:
            raise EngineError(
                f"{path} was made by a newer tenure (its schema is {version}, this one knows "
                f"{VERSION}): upgrade tenure here, or use another file"
            )
        return bool(version == VERSION)
    if application == BACKUP_ID:
        raise EngineError(
            f"{path} is a backup, not a store: 'tenure restore {path} --url sqlite:///FILE' makes "
            "a store of it"
        )
    if application or version or tables:
        raise EngineError(
            f"{path} is another program's SQLite database. Name a file of its own for tenure"
        )
    return False


def create(connection: sqlite3.Connection, path: str, *, portable: bool) -> None:
    """Create the tables, or upgrade them, if needed. In a transaction."""
    if is_ready(connection, path, portable=portable):
        return
    application = application_id(portable=portable)
    if connection.execute("PRAGMA application_id").fetchone() == (application,):
        upgrade(connection)
        return
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute(
        "INSERT INTO nodes VALUES (1, ?, 0, 0, 'unset', 'unset', 'unset', 0)", (DEFAULT_NODE,)
    )
    connection.execute(
        "INSERT INTO meta VALUES (1, '', 0, 0, 0, 0, 0, ?, 0, 0, 0, 0)", (secrets.token_hex(16),)
    )


def progress(connection: sqlite3.Connection) -> tuple[int, int, int, str] | None:
    """Return the last ids of requests, sessions and events, and the identity of the store."""
    found: tuple[int, int, int, str] | None = connection.execute(
        "SELECT last_order_id, last_session_id, last_news_id, identity FROM meta"
    ).fetchone()
    return found


def missing(connection: sqlite3.Connection) -> str:
    """Return which table, or row of the table `meta`, was deleted; empty if none was."""
    try:
        found = connection.execute(
            "SELECT (SELECT count(*) FROM meta), (SELECT 1 FROM nodes, participants, sessions, "
            "semaphores, contents, requests, rates, watches, news LIMIT 0)"
        ).fetchone()
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such table"):
            raise
        return str(error)
    return "" if found[0] else "the row of the table meta was deleted"


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade the tables of an earlier version. In a transaction."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < 2:
        connection.execute("ALTER TABLE meta ADD COLUMN durable INTEGER NOT NULL DEFAULT 0")
    if version < 3:
        # The windows of its sessions are unknown, so the longest possible one is assumed.
        for column in (
            "identity TEXT NOT NULL DEFAULT ''",
            f"longest_window REAL NOT NULL DEFAULT {MAX_WINDOW}",
            "quarantine REAL NOT NULL DEFAULT 0",
            "quarantined_until REAL NOT NULL DEFAULT 0",
            "saved_at REAL NOT NULL DEFAULT 0",
        ):
            connection.execute(f"ALTER TABLE meta ADD COLUMN {column}")
        connection.execute("UPDATE meta SET identity = ?", (secrets.token_hex(16),))
    if version < 4:
        for statement in _TABLES.split(";"):
            if "rates" in statement:
                connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


# SQLite's errors


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def is_busy(error: BaseException) -> bool:
    """Return true if another program has locked the database."""
    return isinstance(error, sqlite3.Error) and _code(error) in _BUSY


def is_damage(error: BaseException) -> bool:
    """Return true if the file is not a database, or a damaged one."""
    return isinstance(error, sqlite3.Error) and _code(error) in {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    }


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def explained(error: Exception, path: str) -> Exception:
    """Convert an error of SQLite or the system to one that says what to do."""
    if isinstance(error, sqlite3.Error):
        explained = explain(error, path)
    elif isinstance(error, OSError) and not isinstance(error, TenureError):
        explained = files.explain(f"cannot use the files of {path}", error)
    else:
        return error
    explained.__cause__ = error
    return explained


_DENIED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_ERRORS = {
    sqlite3.SQLITE_FULL: "the disk of {path} is full. Make room: nothing has been lost",
    sqlite3.SQLITE_IOERR: "{path} could not be read or written (a full or failing disk?), and "
    "nothing was changed: {error}",
    sqlite3.SQLITE_NOTADB: "{path} is not an SQLite database. Name another file",
    sqlite3.SQLITE_CORRUPT: "{path} is damaged: {error}. Stop all programs that use it, then "
    "restore it from a copy, or remove it with its -wal and -shm and its folder .tenure",
    sqlite3.SQLITE_CANTOPEN: "{path} cannot be opened (removed, or its folder is not writable?): "
    "{error}",
    **dict.fromkeys(
        _DENIED, "{path} cannot be written by this user, or is on a read-only file system: {error}"
    ),
    **dict.fromkeys(
        _BUSY,
        "another program keeps {path} locked (a shell with an open transaction, a backup tool?). "
        "End it, or its transaction",
    ),
}
"""Messages for the codes of SQLite, with places for the path and the error."""

_SHORTER = (
    "{path} or its log {path}-wal is shorter than its index says, and nothing was changed: "
    "{error}. Usually one of them was removed or replaced while a program used it. "
    "End every program that uses {path}, then try again{users}"
)


def explain(error: sqlite3.Error, path: str) -> TenureError:
    """Return an error that explains SQLite's error, and says what to do about it."""
    text = _ERRORS.get(_code(error), "{path} cannot be used: {error}")
    short_read = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHORT_READ
    unreadable = _code(error) == sqlite3.SQLITE_NOTADB
    if short_read or (
        (unreadable or _code(error) in _BUSY) and _is_truncated(path, log=unreadable)
    ):
        text = _SHORTER
    kind = AuthenticationFailed if _code(error) in _DENIED else EngineError
    users = ""
    if text is _SHORTER and (found := users_of(path)):
        users = f": {found}"
    return kind(text.format(path=path, error=error, users=users))


def _is_truncated(path: str, *, log: bool) -> bool:
    """Return true if the database, or its log if that counts, is empty, and the log is in use."""
    try:
        sizes = {os.stat(path).st_size, os.stat(f"{path}-wal").st_size if log else 1}
        return 0 in sizes and os.stat(f"{path}-shm").st_size > 0
    except OSError:  # a store without a log
        return False
