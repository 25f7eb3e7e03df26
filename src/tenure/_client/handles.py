"""Mistakes that every handle reports: the wrong kind of ``with``, pickling, and being dropped.

A handle is a client, a session, or an object made by one of them. It belongs to one process, and to
the API (asynchronous or sync) that made it.

A handle that is garbage collected while it holds something in the store ends it, with a
`ResourceWarning` that names the program's line. Rules:

* Only the program's objects refer to a handle. The session, the client and their tasks refer to a
  `Request` or a core, and an *anchor* (`source`) stands between a handle and a core.
* A finalizer runs in any thread, at any instruction. It reads attributes, schedules the end on the
  event loop without waiting, and warns. It does nothing in a forked child, because the parent
  still uses what is held; in the interpreter's exit; and when the event loop is closed, because
  then nothing is renewed any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
import warnings
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tenure._client.habits import missing_attribute, not_a_block
from tenure.errors import Misuse


def note_failure(error: BaseException | None, failure: Exception, what: str) -> None:
    """Report a failure to leave a block, without hiding the body's error.

    Raises `failure` if there is no `error`; otherwise adds it to `error` as a note.
    """
    if error is None:
        raise failure
    error.add_note(f"and {what} failed: {failure}")


_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    str(contextlib.__file__),
)
_LOOPS = os.path.dirname(asyncio.__file__) + os.sep
_PROGRAM, _TENURE, _LOOP = "the program", "tenure", "the event loop"
_owners: dict[str, str] = {}
"""Owner of each source file. A look-up takes a third of the time of comparing paths."""

_STACK_DEPTH = 10
_new_tuple = tuple.__new__  # a fifth of the time of the named tuple's own constructor


class CallSite(NamedTuple):
    """The program's line that obtained a handle.

    Attributes:
        code, instruction: the call. Its line is looked up only for a message.
        stack: the lines of the calls around it; empty outside asyncio's debug mode.
    """

    code: CodeType | None
    instruction: int
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "an unknown line" if self.code is None else f"{self.file}:{self.line}"

    @property
    def file(self) -> str:
        """The file, as the interpreter names it."""
        return "<unknown>" if self.code is None else self.code.co_filename

    @property
    def line(self) -> int:
        """The number of the line; 0 if it is unknown."""
        lines = () if self.code is None else self.code.co_lines()
        return next((line for _, end, line in lines if line and self.instruction < end), 0)


UNKNOWN = CallSite(None, 0)


def call_site(*, debug: bool = False, otherwise: CallSite | None = None) -> CallSite:
    """Return the innermost line outside tenure that led to this call.

    Args:
        debug: include the lines around it.
        otherwise: the result if no such line is on the stack: a task may run the call itself, or
            the portal of `tenure.blocking`.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  the public functions take longer
    owner = _TENURE
    while frame is not None and owner is _TENURE:
        code = frame.f_code
        owner = _owners.get(code.co_filename) or _classify(code.co_filename)
        if owner is _TENURE:
            frame = frame.f_back
    if frame is None or owner is _LOOP:  # a task runs the call itself
        return otherwise or UNKNOWN
    if debug:
        stack = traceback.extract_stack(frame, _STACK_DEPTH)
        return CallSite(code, frame.f_lasti, tuple(stack.format()))
    return _new_tuple(CallSite, (code, frame.f_lasti, ()))


def _classify(file: str) -> str:
    owner = _PROGRAM
    if file.startswith(_NOT_THE_PROGRAM):
        owner = _TENURE
    elif file.startswith(_LOOPS):
        owner = _LOOP
    _owners[file] = owner
    return owner


def warn_dropped(handle: object, site: CallSite, what: str, advice: str) -> None:
    """Warn about a handle that was garbage collected while it held something."""
    around = "".join(("\nMost recent call last:\n", *site.stack)) if site.stack else ""
    warnings.warn_explicit(
        f"{what} was dropped by the program, which obtained it at {site}. {advice}{around}",
        ResourceWarning,
        site.file,
        site.line,
        source=handle,
    )


class Handle:
    """Base of all handles: cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise Misuse(
            f"{self!r} cannot be pickled or copied, because it belongs to this process: pass the "
            "URL to the other process and call connect() there"
        )

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name):
            raise missing_attribute(self, name, sync=not isinstance(self, AsyncHandle))


class AsyncHandle(Handle):
    """Base of the asynchronous handles: rejects ``with``."""

    __slots__ = ()

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:  # pragma: no branch

        def __enter__(self):
            raise Misuse(
                f"{self!r} is entered with 'async with'; for 'with', in a program without an "
                "event loop, import tenure.blocking"
            )

        async def __aenter__(self):
            raise not_a_block(self)

        async def __aexit__(self, *_):
            """Never called, since entering raises; Python looks it up first."""

        def __exit__(self, *_):
            """Never called, since entering raises; Python looks it up first."""
