"""Diagnosis of a store, from the machine to a handover of a lock.

It must work when the store does not, so it raises nothing and waits only seconds for each answer.
It needs only the standard library: `python -m tenure.doctor` prints the findings of `tenure
doctor`.

Three parts: ``machine`` checks the machine; the engine diagnoses its own store
(`tenure.engines.contract`); ``trial`` attaches sessions and hands a mutex over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tenure._client.client import default_url
from tenure.doctor.trial import look_at_machine, try_out
from tenure.engines import diagnose
from tenure.engines.contract import Finding
from tenure.errors import TenureError

__all__ = ["Finding", "examine", "healthy", "summary"]


def examine(url: str | None = None) -> Iterator[Finding]:
    """Examine a store, and yield the findings as they are made. Raises nothing.

    Args:
        url: the store; by default, that of `tenure.connect`.
    """
    yield from look_at_machine()
    chosen = default_url() if url is None else url
    yield Finding("ok", "URL", f"{without_secrets(chosen)}  ({_origin(url)})")
    broken = absent = False
    try:
        for finding in diagnose(chosen):
            broken = broken or finding.level == "failure"
            absent = absent or finding.absent
            yield finding
    except TenureError as error:
        yield Finding.of_error("engine", error)
        return
    except Exception as error:
        # The trial decides.
        yield Finding("warning", "engine", f"the examination itself failed: {error!r}")
    if broken:
        yield Finding("warning", "trial", "left out, because it cannot succeed yet")
    elif absent:
        yield Finding("ok", "trial", "left out: there is no store yet, and a doctor makes none")
    else:
        yield from try_out(chosen)


def healthy(findings: list[Finding]) -> bool:
    """Return whether the store can be used."""
    return not any(each.level == "failure" for each in findings)


def summary(findings: list[Finding]) -> str:
    """Return a summary of the findings in one line."""
    failures = sum(each.level == "failure" for each in findings)
    warnings = sum(each.level == "warning" for each in findings)
    if failures:
        return f"{_several(failures, 'failure')}, {_several(warnings, 'warning')}: not usable"
    return f"usable, with {_several(warnings, 'warning')}" if warnings else "all is well"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def without_secrets(url: str) -> str:
    """Return the URL with credentials masked, even if they are in the wrong form."""
    without = re.sub(r"(?<=://)(?=[^/?#]).*@", "***@", url)
    return re.sub(r"([?&][^=&]*(?:password|token)=)[^&#]*", r"\1***", without)


def _origin(given: str | None) -> str:
    if given is not None:
        return "given"
    return "from TENURE_URL" if os.environ.get("TENURE_URL") else "the default"
