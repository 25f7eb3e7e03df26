"""What a mutant changes, read from the file in which mutmut keeps all mutants of a module.

mutmut writes the original of a function and each of its mutants one below the other, named
`x_name__mutmut_orig` and `x_name__mutmut_7`, or `xǁClassǁname__mutmut_7` for a method. A mutant's
number changes with the code around it; what it changes is what identifies it here.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Mutant:
    """The lines that a mutant of a function replaces, and what stands there instead."""

    function: str
    was: str
    made: str


def look_up(path: Path, module: str, names: list[str]) -> list[Mutant]:
    """The mutants of these names, as mutmut calls them, in the order of their functions."""
    if not names:
        return []
    functions = {
        node.name: ast.unparse(node).replace(f"def {node.name}(", "def (", 1).splitlines()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    dotted = module.removesuffix(".py").replace("/", ".")
    found = []
    for name in names:
        mangled = name.rpartition(".")[2]
        plain = mangled.rpartition("__mutmut_")[0]
        was, made = _changed(functions[f"{plain}__mutmut_orig"], functions[mangled])
        found.append(Mutant(f"{dotted}.{_readable(plain)}", was, made))
    return sorted(found)


def _readable(mangled: str) -> str:
    """`Class.name` or `name`."""
    return mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")


def _changed(was: list[str], made: list[str]) -> tuple[str, str]:
    lines = list(difflib.ndiff(was, made))
    removed, added = (
        " ".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return removed, added
