"""Checks of the form of the package's log lines, in its sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tenure

PACKAGE = Path(tenure.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS = {"log", "_log", "LOGGER", "_logger", "logger"}
KEYS = {"node", "name", "session", "holder", "url", "peer", "member", "event"} | {
    *("operation", "task", "item", "count", "seconds", "started", "reason", "error"),
    *("acquired", "position", "state"),
}


def _calls() -> Iterator[tuple[str, ast.expr]]:
    """Yield the place and the message of every call that logs a line at a fixed level."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and re.split(r"\W", ast.unparse(node.func.value))[-1] in LOGGERS
            ):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.args[0]


def test_a_message_is_a_constant_with_its_fields_at_the_end() -> None:
    calls = list(_calls())
    assert len(calls) > 40  # the search finds them
    wrong = []
    for place, message in calls:
        if isinstance(message, ast.Name) and place.startswith(("server/log.py", "_client/leading")):
            continue  # the caller's constant
        if not isinstance(message, ast.Constant) or not isinstance(message.value, str):
            wrong.append(f"{place}: not a constant")
            continue
        text = message.value
        keys = re.findall(r"(\w+)=%", text)
        fields = re.search(r"(?:(?:^|: | )\w+=%(?:[srd]|\.\df))*$", text)
        assert fields is not None
        if unknown := set(keys) - KEYS:
            wrong.append(f"{place}: unknown fields {sorted(unknown)}")
        if len(keys) != len(re.findall(r"\w+=%", fields[0])):
            wrong.append(f"{place}: a field before the end: {text}")
        if re.search(r"(?<!=)%[sr]", text):
            wrong.append(f"{place}: a value outside of the fields: {text}")
        if text[0].isupper() and not text.startswith("INFO"):
            wrong.append(f"{place}: begins with a capital: {text}")
        if "error" in keys[:-1]:
            wrong.append(f"{place}: 'error' is not the last field: {text}")
    assert wrong == []
