"""Presentation of a package's public names: where they say they live, and `dir`.

`tenure`, `tenure.blocking` and `tenure.recipes` collect names that other modules define. `publish`
makes these objects show the package, so that a traceback, `help` and a pickle name the address
that a program imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType

__all__ = ["publish"]


def publish(package: str, names: Iterable[str], namespace: Mapping[str, object]) -> None:
    """Set ``__module__`` of the classes and functions that a package defines the public names of.

    What is neither a class nor a function, or was published before, is left alone.

    Args:
        package: the dotted name of the package.
        names: its public names.
        namespace: its globals.
    """
    for name in names:
        thing = namespace.get(name)  # some are imported on first use
        if isinstance(thing, type | FunctionType) and thing.__module__ not in _PACKAGES:
            thing.__module__ = package


_RECIPES = ("tenure.recipes", "tenure.blocking.recipes")
_PACKAGES = frozenset({"tenure", "tenure.blocking", "tenure.fencing", *_RECIPES})
"""The packages that publish names of other modules."""
