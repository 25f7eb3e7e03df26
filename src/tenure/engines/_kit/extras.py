"""Error for an engine whose extra is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tenure.errors import Unsupported

__all__ = ["needs_extra"]


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
