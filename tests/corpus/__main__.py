"""Write docs/evidence/pains.md."""

from __future__ import annotations

from tests.corpus.document import DOCUMENT, document

if __name__ == "__main__":
    DOCUMENT.write_text(document())
