"""Errors for what an engine needs and does not find: its extra, or an event loop of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tenure.errors import Unsupported


@contextmanager
def needs_extra(scheme: str, extra: str) -> Iterator[None]:
    """Context for importing an engine's modules; a missing package names the extra to install.

    Raises:
        Unsupported: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "tenure":
            raise
        raise Unsupported(
            f"{scheme}:// needs {missing}, which is not installed; install it with: "
            f"pip install 'tenure[{extra}]'"
        ) from error


def selector_loop(scheme: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop, which has to wait for sockets (`add_reader`).

    Raises:
        Unsupported: it is asyncio's default on Windows, which cannot.
    """
    loop = asyncio.get_running_loop()
    proactor: type[asyncio.AbstractEventLoop] | None = getattr(asyncio, "ProactorEventLoop", None)
    if proactor is not None and isinstance(loop, proactor):
        raise Unsupported(
            f"{scheme}:// needs asyncio's SelectorEventLoop, and Windows has another one by "
            "default: with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner: "
            "runner.run(main()). tenure.blocking has its own"
        )
    return loop
