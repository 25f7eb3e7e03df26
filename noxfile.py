"""Sessions of nox: the tests on every supported Python, the checks and the documentation.

``nox`` runs the checks, and the tests on each Python that is installed. ``nox -s tests-3.13 --
tests/core`` runs a part on one. `make` does the same for one Python without nox.
"""

from __future__ import annotations

import nox

nox.options.sessions = ["check", "tests"]
nox.options.error_on_missing_interpreters = False  # what is there is run

PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests, or those that the arguments choose."""
    session.install("-e", ".[cli,dev]")
    chosen = session.posargs or ["-n", "4", "--dist", "worksteal", "-m", "not exhaustive"]
    session.run("pytest", *chosen)


@nox.session
def check(session: nox.Session) -> None:
    """Check style, formatting and types, and what is generated."""
    session.install("-e", ".[cli,dev]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy", "src", "tests", "benchmarks", "chaos", "examples", "tools")
    session.run("python", "-m", "tools.sync", "--check")
    session.run("python", "-m", "tools.diagrams", "--check")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site."""
    session.install("-e", ".[cli,dev,docs]")
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build")
