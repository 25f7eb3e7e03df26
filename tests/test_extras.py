"""Each extra installs what its name promises, and no more.

A program that uses an extra runs here in an interpreter that can import only what that extra
installs, as the metadata of the installed packages has it.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]["optional-dependencies"]

INTERNAL = {"all", "bench", "browser", "dev", "docs", "mutation", "release"}
CONNECTS = "import tenure; tenure.connect({!r})"
INSTRUMENTS = (
    "import asyncio, tenure, tenure.telemetry.prometheus\n"
    "async def main():\n"
    "    async with tenure.connect('memory://') as client:\n"
    "        tenure.{}.instrument(client)\n"
    "        async with client.mutex('a').lock(): pass\n"
    "asyncio.run(main())"
)
SERVES = (
    "import sys; from tenure.cli import main; sys.argv = ['tenure', 'serve', '--check', "
    "'--store', 'memory://', *{!r}.split()]; sys.exit(main())"
)

PROGRAMS = {
    "cli": ["import sys; from tenure.cli import main; sys.argv[1:] = ['ls']; sys.exit(main())"],
    "console": [
        SERVES.format("--listen http://127.0.0.1:0"),
        "import tenure.cli.console, tenure.console.local",
    ],
    "etcd": [CONNECTS.format("etcd://localhost")],
    "interop": ["import tenure.interop.effect, tenure.interop.exclusive_lock"],
    "native": [CONNECTS.format("tenure://localhost")],
    "otel": [INSTRUMENTS.format("telemetry")],
    "postgresql": [CONNECTS.format("postgresql://localhost")],
    "prometheus": [INSTRUMENTS.format("telemetry.prometheus")],
    "redis": [CONNECTS.format("redis://localhost")],
    "server": [SERVES.format("--listen tenure://127.0.0.1:0 --listen dflockd://127.0.0.1:0")],
    "server-ydb": [SERVES.format("--listen tenure://127.0.0.1:0 --listen ydb://127.0.0.1:0")],
    "ydb": [CONNECTS.format("ydb://localhost/local")],
}


def distributions(requirement: Requirement) -> set[str]:
    """The distributions that a requirement installs, itself among them."""
    found: set[str] = set()
    waiting = [requirement]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        if name == "tenure":
            waiting += [Requirement(line) for extra in each.extras for line in EXTRAS[extra]]
        elif name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(line) for line in requires(name) or ()]
    return found


def modules(extra: str) -> set[str]:
    """The top-level modules that an extra installs."""
    installed = distributions(Requirement(f"tenure[{extra}]"))
    return {
        module
        for module, owners in packages_distributions().items()
        if installed & {canonicalize_name(owner) for owner in owners}
    }


@pytest.mark.parametrize(
    ("extra", "program"), [(extra, program) for extra in PROGRAMS for program in PROGRAMS[extra]]
)
def test_an_extra_installs_all_that_its_name_promises(
    extra: str, program: str, tmp_path: Path
) -> None:
    absent = set(packages_distributions()) - modules(extra) - {"tenure"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\nfor each in {absent!r}: sys.modules[each] = None\n{program}",
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("server", "ydb"),
        ("server", "grpc"),
        ("server", "h2"),
        ("redis", "redis"),
        ("cli", "msgspec"),
    ],
)
def test_an_extra_installs_no_more_than_its_name_promises(extra: str, module: str) -> None:
    assert module not in modules(extra)
    assert module in modules("all")


def test_every_extra_for_users_is_checked_here() -> None:
    assert set(PROGRAMS) == set(EXTRAS) - INTERNAL
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == set(PROGRAMS)
