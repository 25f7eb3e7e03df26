"""Identity of a program: its host, process id and name, as part of a session's description.

A store keeps a session's description as an opaque text of at most 1,024 bytes. The client appends
the identity to it, in brackets and with the program's name last::

    nightly backup [host=db-1 pid=4242 program=backup.py]

Engines and servers do not change the text. A client that reads a description splits it, so a
program sees the original text and, separately, the host, the process and the program.

Rules:

* The text is readable in other tools, and a client in any language may write it.
* ``[host=]`` is the empty identity. It follows a text that itself ends like an identity.
* If the limit is exceeded, the program's name is cut first, then the whole identity is omitted. The
  program's own text is never shortened. A text of more than 1,016 bytes that ends like an identity
  leaves no room for the empty identity, so its last ``[`` becomes ``(``.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription

__all__ = [
    "ANONYMOUS",
    "Identity",
    "described",
    "holder_name",
    "identify_by_default",
    "part",
    "program_name",
    "retold",
    "seen_from",
    "semaphore_with_identities",
    "session_with_identity",
    "this_program",
]

DESCRIPTION_BYTES = 1024
HOST_BYTES = 255

_IDENTITY = re.compile(
    r"(?:(?P<text>.*) )?"
    r"\[host=(?P<host>[^\s\[\]]*)(?: pid=(?P<pid>[0-9]{1,10}))?"
    r"(?: program=(?P<program>[^\[\]]+))?\]",
    re.DOTALL,
)
_OFF = frozenset({"0", "no", "off", "false"})


class Identity(NamedTuple):
    """Host, process id and name of a program; ``None`` is unknown."""

    host: str | None = None
    pid: int | None = None
    program: str | None = None


ANONYMOUS = Identity()
"""The identity of a program that does not publish any."""


def identify_by_default() -> bool:
    """Return whether sessions carry their program's identity: unless ``TENURE_IDENTIFY=0``."""
    return os.environ.get("TENURE_IDENTIFY", "").strip().lower() not in _OFF


def this_program() -> Identity:
    """Return the identity of this process; in a forked child, the child's."""
    return Identity(_host(), os.getpid(), _program())


@cache
def _host() -> str | None:
    try:
        return socket.gethostname() or None
    except OSError:  # pragma: no cover  (a sandbox that forbids the call)
        return None


@cache
def _program() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = next(iter(getattr(sys, "argv", ())), "")
    return program_name(getattr(spec, "name", ""), os.fsdecode(script), sys.executable)


def program_name(module: str, script: str, interpreter: str | None) -> str:
    """Return the name of a program, as users know it.

    Args:
        module: the name of the main module after ``python -m``, else empty.
        script: the first argument, ``sys.argv[0]``.
        interpreter: the path of the interpreter.
    """
    if module not in {"", "__main__", "__mp_main__"}:
        return module.removesuffix(".__main__")
    folder, name = os.path.split(script)
    if name in {"", "-", "-c"}:
        return os.path.basename(interpreter or "") or "python"
    return (os.path.basename(folder) or name) if name == "__main__.py" else name


# Descriptions as stores keep them


def described(text: str, identity: Identity) -> str:
    """Return a description with an identity, of at most 1,024 bytes if `text` has no more."""
    if identity != ANONYMOUS:
        suffix = _suffix(identity, DESCRIPTION_BYTES - len(text.encode()) - bool(text))
        if suffix is not None:
            return f"{text} {suffix}" if text else suffix
    if _IDENTITY.fullmatch(text) is None:
        return text
    if len(text.encode()) + len(" [host=]") <= DESCRIPTION_BYTES:
        return f"{text} [host=]"
    before, _, after = text.rpartition("[")
    return f"{before}({after}"


def _suffix(identity: Identity, room: int) -> str | None:
    """Return the longest form of an identity that fits, or ``None``."""
    host = _cut(re.sub(r"[\s\[\]]", "_", _visible(identity.host or "")), HOST_BYTES)
    start = f"[host={host}" + ("" if identity.pid is None else f" pid={identity.pid}")
    left = room - len(start.encode()) - len("]")
    program = re.sub(r"[\[\]]", "_", _visible(identity.program or ""))
    program = _cut(program, left - len(" program="))
    if program:
        return f"{start} program={program}]"
    return f"{start}]" if left >= 0 else None


def _visible(text: str) -> str:
    return "".join(each if each.isprintable() else "_" for each in text)


def _cut(text: str, size: int) -> str:
    return text.encode()[: max(0, size)].decode(errors="ignore")


def part(stored: str) -> tuple[str, Identity | None]:
    """Split a stored description into the program's own text and the identity.

    The identity is ``None`` if the description has none, and `ANONYMOUS` if it has an empty one.
    """
    if not stored.endswith("]"):
        return stored, None
    found = _IDENTITY.fullmatch(stored)
    if found is None:
        return stored, None
    pid, program = found["pid"], found["program"]
    identity = Identity(found["host"] or None, None if pid is None else int(pid), program)
    return found["text"] or "", identity


def retold(stored: str, taking_over: str) -> str:
    """Return the description of a session that another program takes over.

    The session keeps its text; the identity is that of the new program.
    """
    return described(part(stored)[0], part(taking_over)[1] or ANONYMOUS)


def seen_from(text: str, host: str | None) -> str:
    """Return the description of a client without an identity, with its address."""
    if host is None or part(text)[1] is not None:
        return text
    return described(text, Identity(host))


# Descriptions as a program sees them


def session_with_identity(session: SessionDescription) -> SessionDescription:
    """Return a session with its description split.

    The program's identity takes precedence over the store's facts: behind a server, the store knows
    only the server.
    """
    text, identity = part(session.description)
    if identity is None:
        return session
    if identity == ANONYMOUS:
        return replace(session, description=text)
    host, pid, program = identity
    return replace(session, description=text, host=host, pid=pid, program=program)


def semaphore_with_identities(semaphore: SemaphoreDescription) -> SemaphoreDescription:
    """Return a semaphore with the descriptions of its requests split."""
    if not (semaphore.owners or semaphore.waiters):
        return semaphore
    return replace(
        semaphore,
        owners=tuple(map(_request_with_identity, semaphore.owners)),
        waiters=tuple(map(_request_with_identity, semaphore.waiters)),
    )


def _request_with_identity(request: RequestDescription) -> RequestDescription:
    text, identity = part(request.session_description or "")
    if identity is None:
        return request
    if identity == ANONYMOUS:
        return replace(request, session_description=text)
    host, pid, program = identity
    return replace(request, session_description=text, host=host, pid=pid, program=program)


def holder_name(request: RequestDescription) -> str:
    """Return the program of a request for people: ``backup.py, pid 4242 on db-1``.

    Characters that are not plainly visible are escaped.
    """
    process = "" if request.pid is None else f"pid {request.pid}"
    name = ", ".join(filter(None, (request.program, process)))
    name = " on ".join(filter(None, (name, request.host))) if name else request.host or ""
    if not name:
        name = f"session {request.session_id}"
    return name if name.isprintable() else "".join(map(_escaped, name))


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
