"""The English of the sources: docstrings say their subject first, and sentences name the actor."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPENING = re.compile(r"(What|Who|Whom|Whose|Whoever|How|That|Whether|Where|When|Why|There)\b")
NO_ACTOR = re.compile(r"\b(nobody|somebody|anybody|whoever|whomever|whom)\b", re.IGNORECASE)
FENCED = re.compile(r"(?ms)^ *(`{3,}|~{3,}).*?^ *\1")

MODULES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_a_docstring_opens_with_a_noun_or_a_verb() -> None:
    assert not [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED) and OPENING.match(text := ast.get_docstring(node) or "")
    ]


def test_a_sentence_names_the_actor() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*MODULES, ROOT / "README.md"]
        for number, line in enumerate(prose(path).splitlines(), start=1)
        if NO_ACTOR.search(line)
    ]


def prose(path: Path) -> str:
    """A module, or a page with its code blocks emptied."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
