"""Rules that every engine applies to its arguments: names, sizes, counts, numbers.

Pure functions. The checks raise `InvalidArgument`, which says what is wrong and what is allowed, so
a mistake has the same error on every engine.
"""

from __future__ import annotations

import math
import re

from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, Liveness, NodeConfig

EXACT = 2**53 - 1
"""The greatest count that every store adds exactly (numbers are doubles in Lua, or become doubles
in SQLite)."""

DATA_BYTES = 1024 * 1024
NAME_BYTES = 1024
DESCRIPTION_BYTES = 1024
PATH_BYTES = 1024
SEGMENT_BYTES = 255
ATTACH_KEY_BYTES = 16
MIN_WINDOW, MAX_WINDOW = 1.0, 30 * 60.0
SESSIONS_PER_NODE = 1_000_000
SEMAPHORES_PER_NODE = 1_000_000
DEFAULT_GRACE = 10.0

_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def check_path(path: str) -> None:
    """Check a node's path: ``/a/b``, segments of ``[A-Za-z0-9._-]``, 1 to 255 bytes each."""
    if not isinstance(path, str):
        raise InvalidArgument(f"a node's path is a str, not {type(path).__name__}")
    if not path.startswith("/"):
        raise InvalidArgument(f"a node's path starts with '/': {path!r}", node=path)
    if len(path) > PATH_BYTES:
        raise InvalidArgument(
            f"a node's path has at most {PATH_BYTES} bytes, this one {len(path)}", node=path
        )
    for segment in path[1:].split("/"):
        if not segment:
            raise InvalidArgument(
                f"a node's path has no empty segment and no '/' at its end: {path!r}", node=path
            )
        if not _SEGMENT.fullmatch(segment) or len(segment) > SEGMENT_BYTES:
            raise InvalidArgument(
                f"segment {segment[:80]!r} of a node's path: 1 to {SEGMENT_BYTES} characters "
                "of A-Z a-z 0-9 . _ -",
                node=path,
            )


def check_droppable(path: str) -> None:
    """Reject dropping ``/default``, which always exists."""
    if path == DEFAULT_NODE:
        raise InvalidArgument(f"the node {DEFAULT_NODE} cannot be dropped", node=path)


def check_name(name: str, node: str | None = None) -> None:
    """Check a semaphore's name: text of 1 to 1,024 bytes in UTF-8."""
    if not isinstance(name, str):
        raise InvalidArgument(f"a name is a str, not {type(name).__name__}", node=node)
    if 0 < len(name) <= NAME_BYTES // 4 and name.isprintable():
        return  # the usual case, without encoding; a lone surrogate is not printable
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a name is valid Unicode text: {name!r}", node=node) from error
    if not 1 <= size <= NAME_BYTES:
        raise InvalidArgument(
            f"a name has 1 to {NAME_BYTES} bytes, this one {size}", node=node, name=name[:80]
        )


def check_data(data: bytes, node: str | None = None, name: str | None = None) -> None:
    """Check the data of a semaphore or a request: at most 1 MiB of bytes."""
    if not isinstance(data, bytes):
        raise InvalidArgument(
            f"data is bytes, not {type(data).__name__}: pass "
            f"{'text.encode()' if isinstance(data, str) else 'bytes(...)'}",
            node=node,
            name=name,
        )
    if len(data) > DATA_BYTES:
        raise InvalidArgument(
            f"data has at most {DATA_BYTES} bytes, this has {len(data)}; store it elsewhere and "
            "keep its address here",
            node=node,
            name=name,
        )


def check_description(description: str, node: str | None = None) -> None:
    """Check a session's description: text of at most 1,024 bytes in UTF-8."""
    if not isinstance(description, str):
        raise InvalidArgument(
            f"a session's description is a str, not {type(description).__name__}", node=node
        )
    try:
        size = len(description.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"a session's description is valid Unicode text: {description!r}", node=node
        ) from error
    if size > DESCRIPTION_BYTES:
        raise InvalidArgument(
            f"a session's description has at most {DESCRIPTION_BYTES} bytes, this has {size}",
            node=node,
        )


def check_key(key: bytes, node: str | None = None) -> None:
    """Check a session's protection key: at most 16 bytes."""
    if len(key) > ATTACH_KEY_BYTES:
        raise InvalidArgument(
            f"a protection key has at most {ATTACH_KEY_BYTES} bytes, this has {len(key)}",
            node=node,
        )


def check_resumable(liveness: Liveness, stored: bytes, key: bytes, node: str, number: int) -> None:
    """Check that a client with `key` may take over a session.

    Raises:
        AuthenticationFailed: the session has another key.
        InvalidArgument: the session ends with its process.
    """
    if stored != key:
        raise AuthenticationFailed(
            f"session {number} on {node} has another key than this resume token", node=node
        )
    if liveness != "window":
        raise InvalidArgument(
            f"session {number} on {node} ends with its process; open a resumable one with "
            "resumable=True",
            node=node,
        )


def not_there_to_resume(node: str, number: int) -> SessionExpired:
    """Return the error for taking over a session that has ended."""
    return SessionExpired(
        f"session {number} on {node} has ended and cannot be resumed: open a new one", node=node
    )


def taken_over(node: str) -> SessionExpired:
    """Return the error for the program whose session was taken over."""
    return SessionExpired(
        f"the session on {node} was taken over: another program has resumed it with its token",
        node=node,
        taken_over=True,
    )


def check_window(window: float, node: str | None = None) -> None:
    """Check a recovery window: 1 second to 30 minutes."""
    if not MIN_WINDOW <= window <= MAX_WINDOW:
        raise InvalidArgument(
            f"a recovery window is {MIN_WINDOW:g} to {MAX_WINDOW:g} seconds, not {window:g}",
            node=node,
        )


def check_limit(limit: int, node: str | None = None, name: str | None = None) -> None:
    """Check a semaphore's limit: 1 to 2^64-1."""
    if not isinstance(limit, int) or not 1 <= limit <= EPHEMERAL_LIMIT:
        raise InvalidArgument(
            f"a limit is a whole number from 1 to 2^64-1, not {limit!r}", node=node, name=name
        )


def check_new_limit(limit: int, node: str | None = None, name: str | None = None) -> None:
    """Check the limit to which a semaphore is changed: 1 to 2^53-1."""
    if not isinstance(limit, int) or not 1 <= limit <= EXACT:
        raise InvalidArgument(
            f"a limit is changed to a whole number from 1 to 2^53-1, not {limit!r}",
            node=node,
            name=name,
        )


def check_resizable(limit: int, node: str, name: str, *, ephemeral: bool) -> None:
    """Reject a change of the limit of an ephemeral semaphore, or of an unbounded one.

    Such a limit counts nothing: a request takes all of it, or any part beside others.
    """
    check_kind(False, ephemeral, node, name)
    if limit > EXACT:
        raise InvalidArgument(
            f"semaphore {name!r} on {node} is unbounded (its limit {limit} is above 2^53-1), and "
            "its limit cannot be changed. Delete it while it is not in use, and create it again",
            node=node,
            name=name,
        )


def check_count(count: int, limit: int, node: str | None = None, name: str | None = None) -> None:
    """Check a request's count: 1 to the limit; above 2^53-1 only the whole limit."""
    if not isinstance(count, int) or not 1 <= count <= limit:
        raise InvalidArgument(
            f"a count is a whole number from 1 to the limit, which is {limit}, not {count!r}",
            node=node,
            name=name,
        )
    if count > EXACT and count != limit:
        raise InvalidArgument(
            f"a count is at most 2^53-1 unless it is the whole limit ({limit}), not {count}",
            node=node,
            name=name,
        )


def check_shrink(
    new: int, old: int, limit: int, node: str | None = None, name: str | None = None
) -> None:
    """Check a new count: a request may shrink in place, but not grow.

    After the limit was lowered, an owner may still have more than the limit.
    """
    check_count(new, max(limit, old), node, name)
    if new > old:
        raise InvalidArgument(
            f"a request cannot grow from {old} to {new}: it would overtake those behind it; "
            "acquire the difference with a second request",
            node=node,
            name=name,
        )


def check_timeout(timeout: float | None, node: str | None = None, name: str | None = None) -> None:
    """Check a timeout: seconds, zero or more and finite, or ``None`` to wait without limit."""
    if timeout is not None and not 0 <= timeout < math.inf:
        raise InvalidArgument(
            f"a timeout is zero or more seconds, or None, not {timeout!r}", node=node, name=name
        )


def check_kind(requested_ephemeral: bool, is_ephemeral: bool, node: str, name: str) -> None:
    """Check the kind of a semaphore: a name on a node is one semaphore, lasting or ephemeral."""
    if requested_ephemeral and not is_ephemeral:
        raise InvalidArgument(
            f"{name!r} on {node} is a lasting semaphore, and is used here as an ephemeral one "
            "(a mutex, a registry); use another name for one of the two",
            node=node,
            name=name,
        )
    if is_ephemeral and not requested_ephemeral:
        raise InvalidArgument(
            f"{name!r} on {node} is an ephemeral semaphore in use (a mutex, a registry), and is "
            "used here as a lasting one (a semaphore, an election, a config); use another name "
            "for one of the two",
            node=node,
            name=name,
        )


def fits(held: int, whole: bool, count: int, limit: int) -> bool:
    """Return true if the first waiting request may own, given what the owners hold.

    A request for the whole limit is admitted only when nothing is held. While an owner holds the
    whole limit (`whole`), no request is admitted. A limit above 2^53-1 is otherwise "unbounded",
    because not every store can add such counts exactly.
    """
    if whole:
        return False
    if count == limit:
        return held == 0
    return limit > EXACT or held + count <= limit


def next_order_id(last: int, seen: int, wall: float) -> int:
    """Return the next order id of an engine that assigns them itself.

    It is greater than the last one (`last`), than any that this program has seen (`seen`, perhaps
    on another engine), and than the wall clock's microseconds. So the ids keep rising after a loss
    of data, unless the clock was set back before the last id.
    """
    now = int(wall * 1e6)
    return now if seen < now > last else max(seen, last) + 1


def grace_period(config: NodeConfig) -> float:
    """Seconds added to sessions of liveness ``window`` after a restart of the store."""
    return config.session_grace_period or DEFAULT_GRACE


def merge_config(old: NodeConfig, new: NodeConfig) -> NodeConfig:
    """Return the configuration after `alter_node`: fields unset in `new` keep `old`'s values."""
    return NodeConfig(
        self_check_period=new.self_check_period or old.self_check_period,
        session_grace_period=new.session_grace_period or old.session_grace_period,
        read_consistency=(
            old.read_consistency if new.read_consistency == "unset" else new.read_consistency
        ),
        attach_consistency=(
            old.attach_consistency if new.attach_consistency == "unset" else new.attach_consistency
        ),
        rate_limiter_counters_mode=(
            old.rate_limiter_counters_mode
            if new.rate_limiter_counters_mode == "unset"
            else new.rate_limiter_counters_mode
        ),
    )
