"""The English of sources and documents: openings of docstrings, actors, lengths of sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPENING = re.compile(r"(What|Who|Whom|Whose|Whoever|How|That|Whether|Where|When|Why|There)\b")
NO_ACTOR = re.compile(r"\b(nobody|somebody|anybody|whoever|whomever|whom)\b", re.IGNORECASE)
LONGEST = 40
"""Words of a sentence in a document, at the most; most should have fewer than 25."""

FENCED = re.compile(r"(?ms)^ *(`{3,}|~{3,}).*?^ *\1")

COMMENT = re.compile(r"(?s)<!--.*?-->")
CODE = re.compile(r"`[^`]*`")
TARGET = re.compile(r"\]\([^)]*\)")
ITEM = re.compile(r"\s*([-*]|\d+\.)\s")
END_OF_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")

PAGES = [
    ROOT / "README.md",
    *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
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
        for path in [*MODULES, *PAGES]
        for number, line in enumerate(prose(path).splitlines(), start=1)
        if NO_ACTOR.search(line)
    ]


def prose(path: Path) -> str:
    """A module, or a page with its code blocks emptied."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    text = FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    return CODE.sub("x", text)


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page outside of code and tables."""
    paragraph: list[str] = []
    for line in [*COMMENT.sub("", prose(page)).splitlines(), ""]:
        ends = not line.strip() or line.lstrip().startswith(("|", "#", ":::"))
        if ends or ITEM.match(line):
            yield from END_OF_SENTENCE.split(TARGET.sub("]", " ".join(paragraph)))
            paragraph = []
        if not ends:
            paragraph.append(line.strip())


def test_no_sentence_of_a_document_is_long() -> None:
    assert not [
        f"{page.relative_to(ROOT)}: {len(sentence.split())} words: {sentence[:80]}"
        for page in PAGES
        for sentence in sentences(page)
        if len(sentence.split()) > LONGEST
    ]


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nOne two. Three\nfour `a b c` five.\n\n- six\n- seven eight\n")
    assert [len(each.split()) for each in sentences(page) if each] == [2, 4, 2, 3]


NON_STANDARD = re.compile(  # "ASK" is an error of Redis
    r"(?<![A-Za-z])(?!(?-i:ASK)\")(asks?|asked|asking|hears?|heard|hearing|tells?|told|telling|believ\w*|anew|bells?"
    r"|spoken|spoke|whatever|whichever|patience|guests?|hosted)(?![A-Za-z])|\bas if\b"
    r"|(gives?|gave|given|giving)[ _](up|back)\b|(comes?|came) back\b|(goes|went) on\b",
    re.IGNORECASE,
)
"""Words for which the field has standard terms: sent, received, notified, considered, again, any,
timeout, withdrawn, released."""


def test_sources_use_the_standard_terms() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if NON_STANDARD.search(line)
    ]
