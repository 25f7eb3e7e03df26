"""Presentation of a package's public names: their module, and `dir`.

`tenure`, `tenure.blocking` and `tenure.recipes` export names that other modules define. `publish`
sets their module to the package, so that a traceback, `help` and a pickle show the name that a
program imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType


def publish(package: str, names: Iterable[str], namespace: Mapping[str, object]) -> None:
    """Set ``__module__`` of the public classes and functions of a package.

    Other objects, and those published before, are not changed.

    Args:
        package: the dotted name of the package.
        names: its public names.
        namespace: the package's globals.
    """
    for name in names:
        thing = namespace.get(name)  # some are imported on first use
        if isinstance(thing, type | FunctionType) and thing.__module__ not in _PACKAGES:
            thing.__module__ = package


_RECIPES = ("tenure.recipes", "tenure.blocking.recipes")
_PACKAGES = frozenset({"tenure", "tenure.blocking", "tenure.fencing", *_RECIPES})
"""The packages that publish names of other modules."""
