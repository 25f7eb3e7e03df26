"""The pages of the engines have one form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_documents import ROOT, blocks_of

FORM = [
    "## URL",
    "## What it promises",
    "## What it costs",
    "## How it fails",
    "## How to operate it",
]
PAGES = sorted(set((ROOT / "docs" / "engines").glob("*.md")) - {ROOT / "docs/engines/choosing.md"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_an_example_and_then_the_sections_of_every_engine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    before, form, _ = text.partition(FORM[0])
    assert form, "it tells no URL"
    assert list(blocks_of(page.name, before)), "it begins with no example"
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[: len(FORM)] == FORM
    assert headings[len(FORM) :] in ([], ["## How it works"])
