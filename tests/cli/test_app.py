"""`tenure` as a program: its help, its version, how fast it starts, what it needs."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

import tenure as tenure_package
from tenure import cli
from tenure.cli.app import LazyGroup, invoke, tenure
from tenure.cli.mistakes import Status, explain
from tests.cli.programs import TENURE, Tenure


def test_the_version(tenure: Tenure) -> None:
    assert tenure("--version").stdout == f"tenure {tenure_package.__version__}\n"


def test_help_is_asked_for_or_given_to_who_says_nothing(tenure: Tenure) -> None:
    asked = tenure("--help")
    assert asked.returncode == 0
    for name in LazyGroup.MODULES:
        assert f"\n  {name} " in asked.stdout
    assert tenure("-h").stdout == asked.stdout
    assert tenure().stdout == asked.stdout
    assert tenure("node").stdout == tenure("node", "--help").stdout


@pytest.mark.parametrize("name", LazyGroup.MODULES)
def test_a_command_is_told_of_with_its_own_words(name: str) -> None:
    context = click.Context(tenure)
    command = tenure.get_command(context, name)
    assert command is not None
    assert command.name == name
    assert LazyGroup.MODULES[name][2] == command.get_short_help_str(limit=200)


def test_help_loads_no_command() -> None:
    code = (
        "import sys; from tenure.cli.app import invoke; invoke(['--help'])\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] == 'rich'"
        " or m.startswith(('tenure.cli.run', 'tenure.cli.look', 'tenure.cli.demo', 'sqlite3'))]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    assert cli.main() == Status.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "tenure: the command line needs rich; install it with: pip install 'tenure[cli]'\n"
    )


def test_a_defect_has_a_traceback_and_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LazyGroup, "get_command", broken)
    assert invoke(["ls"]) == Status.DEFECT
    said = capsys.readouterr().err
    assert "ZeroDivisionError: planted" in said
    assert said.endswith("please report it\n")


def test_an_output_that_cannot_be_written_is_no_defect(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    for command in (["ls"], ["watch", "gpu", "--once", "--json"]):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run(
                [*TENURE, *command],
                stdout=full,
                stderr=subprocess.PIPE,
                env=tenure.environment,
                text=True,
                check=False,
            )
        assert done.returncode == Status.STORE
        assert done.stderr.startswith("tenure: the output cannot be written: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [each for each in tenure_package.__all__ if each[0].isupper()])
def test_every_error_of_tenure_has_an_exit_code(name: str) -> None:
    error = getattr(tenure_package, name)
    if not (isinstance(error, type) and issubclass(error, tenure_package.TenureError)):
        return
    # Our own defects, and what no command does.
    unexplained = {"TenureError", "Misuse", "SelfDeadlock", "LeaseReleased", "StaleToken"}
    assert (explain(error("what\nhappened")) is None) == (name in unexplained)
