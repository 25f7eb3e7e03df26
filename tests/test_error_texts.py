"""Checks of the form of error texts, in the sources: `CONTRIBUTING.md` describes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tenure
from tenure import errors

PACKAGE = Path(tenure.__file__).parent
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}
PRODUCTS = {"Linux", "OpenSSL", "Redis", "SQLite", "YDB", "TLS", "HTTP", "URL", "DB-API", "Python"}
"""Names with a capital letter that a text may start with."""


def _texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every error that is made with a literal text.

    Values inside it are replaced by ``{}``.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = re.split(r"\W", ast.unparse(node.func))[-1]
            if name in ERRORS and (text := _literal(node.args[0])) is not None:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def _literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join("{}" if (text := _literal(each)) is None else text for each in node.values)


def test_a_text_begins_in_lower_case_and_does_not_shout() -> None:
    texts = list(_texts())
    assert len(texts) > 300  # the search finds them
    wrong = []
    for place, text in texts:
        first = re.split(r"[\s':,{]", text)[0]
        if first[:1].isupper() and first not in PRODUCTS and not re.fullmatch(r"[A-Z_]+", first):
            wrong.append(f"{place}: begins with a capital: {text}")
        if text.endswith("!"):
            wrong.append(f"{place}: ends with an exclamation mark: {text}")
    assert wrong == []
