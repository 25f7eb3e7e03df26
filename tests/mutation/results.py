"""What came of the mutants of each module, kept in `results.json`."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from tests.mutation.groups import HERE
from tests.mutation.mutants import Mutant

KILLED, TIMED_OUT, SURVIVED, UNTESTED = "killed", "timed out", "survived", "untested"

_FILE = HERE / "results.json"


@dataclass(frozen=True)
class Module:
    """One run over a module. With a `seed`, `tried` mutants were drawn from `all` of them."""

    name: str
    all: int
    tried: int
    killed: int
    timed_out: int
    seed: int | None
    survivors: list[Mutant]
    python: str = field(default_factory=platform.python_version)


def modules() -> list[Module]:
    """What is kept, in the order of the modules' names."""
    kept = json.loads(_FILE.read_text()) if _FILE.exists() else []
    return [
        Module(**{**each, "survivors": [Mutant(**mutant) for mutant in each["survivors"]]})
        for each in kept
    ]


def merge(new: Iterable[Module]) -> None:
    """Keep these, instead of what is kept of the same modules."""
    kept = {module.name: module for module in (*modules(), *new)}
    ordered = [asdict(kept[name]) for name in sorted(kept)]
    _FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
