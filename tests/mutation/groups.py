"""The groups of modules that are mutated together, and where things are."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Group:
    """One of the tables of `groups.toml`, which says what the fields are."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    without: str

    def paths(self, package: Path = ROOT / "src" / "tenure") -> list[Path]:
        """The modules' source files, sorted. Bytecode beside them does not count."""
        found = {path for pattern in self.modules for path in package.glob(pattern)}
        return sorted(path for path in found if path.suffix == ".py")

    @property
    def folder(self) -> Path:
        """Where mutmut works: a copy of the repository, for this group alone."""
        return ROOT / ".mutation" / self.name


def groups() -> dict[str, Group]:
    tables = tomllib.loads((HERE / "groups.toml").read_text())
    return {
        name: Group(name, tuple(table["modules"]), tuple(table["tests"]), table["without"])
        for name, table in tables.items()
    }
