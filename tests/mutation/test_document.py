"""docs/evidence/mutation.md shows the last results, and every survivor has its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.mutation.document import DOCUMENT, rendered, unexplained
from tests.mutation.groups import ROOT, Group, groups
from tests.mutation.mutants import Mutant, look_up
from tests.mutation.results import modules

ORIGINAL_AND_MUTANTS = """
def x_fits__mutmut_orig(held, count):
    return held + count <= 4

def x_fits__mutmut_1(held, count):
    return held - count <= 4

class Queue:
    async def xǁQueueǁnext__mutmut_orig(self):
        self.first = None
        return self.first

    async def xǁQueueǁnext__mutmut_12(self):
        self.first = ""
        return self.first
"""


def test_the_document_is_what_the_results_say() -> None:
    assert DOCUMENT.read_text() == rendered()


def test_every_survivor_has_a_reason() -> None:
    assert unexplained() == []


def test_what_was_tried_is_killed_ended_or_listed() -> None:
    for module in modules():
        assert module.tried == module.killed + module.timed_out + len(module.survivors), module


def test_every_group_names_modules_and_tests_that_there_are() -> None:
    for group in groups().values():
        for pattern in group.modules:
            assert replace(group, modules=(pattern,)).paths(), pattern
        for test in group.tests:
            assert (ROOT / test).exists(), test


def test_a_group_has_source_files_alone(tmp_path: Path) -> None:
    """Python writes its bytecode beside the sources, unless the environment forbids it."""
    (tmp_path / "core" / "__pycache__").mkdir(parents=True)
    for name in ("core/rules.py", "core/__pycache__/rules.cpython-311.pyc", "core/py.typed"):
        (tmp_path / name).touch()
    group = Group("core", ("core/*", "core/r*"), tests=(), without="")
    assert group.paths(tmp_path) == [tmp_path / "core" / "rules.py"]


def test_a_mutant_is_known_by_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "queue.py"
    path.write_text(ORIGINAL_AND_MUTANTS)
    names = ["tenure.core.queue.xǁQueueǁnext__mutmut_12", "tenure.core.queue.x_fits__mutmut_1"]
    assert look_up(path, "tenure/core/queue.py", names) == [
        Mutant("tenure.core.queue.Queue.next", "self.first = None", "self.first = ''"),
        Mutant("tenure.core.queue.fits", "return held + count <= 4", "return held - count <= 4"),
    ]
