"""What the documents show is run.

In README.md and docs/**/*.md:

- a ``python`` block is a complete program, and a ``console`` block a terminal session, of which
  the lines that start with `$ tenure` (or `$ export`) are run by bash, one after the other. What
  a line prints is not compared. It must exit 0, or with N where the line `# exit N` follows it;
- each block runs in a fresh folder that is also its home and its state folder, with warnings as
  errors, and in 60 seconds;
- `postgresql:///jobs` is an empty database, for blocks that have this text;
- ``<!-- expect: text -->`` on the line above a block: the block must print that text. Several
  such lines above one another must be printed in that order;
- no block of these two languages can be excepted. What cannot run is ``text`` or ``pycon``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.fencing.servers import a_postgres, jobs_database

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 60  # seconds for one block
POSTGRESQL = "postgresql:///jobs"

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[^\s`]*)[^`]*")
COMMENT = re.compile(r"\s*<!--\s*(?P<kind>expect|test):\s*(?P<text>.*?)\s*-->\s*")
PROMPT = "$ "
EXIT = re.compile(r"# exit (?P<status>\d+)")
RUNS_TENURE = re.compile(r"(?:^|[|;&(]\s*)(?:\w+=\S*\s+)*(?:python3? -m )?tenure(?:\s|$)")

# Only these, so that a block is not left out by a slip of the pen: `py`, `sh`, or nothing at all.
LANGUAGES = frozenset(
    "console diff dockerfile html ini json lua make mermaid protobuf pycon python sql text toml "
    "yaml".split()
)


DIRECTIVE = re.compile(r"\{[a-z-]+\}")  # of the documentation site


class DocumentError(Exception):
    """A document is not written as the top of this file says."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    place: str  # file:line of the fence
    language: str
    text: str
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One line of a terminal session that is run."""

    text: str
    status: int


# --- reading -------------------------------------------------------------------------------


def blocks_of(name: str, document: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown document."""
    lines = iter(enumerate(document.splitlines(), start=1))
    expected: list[str] = []
    for number, line in lines:
        place = f"{name}:{number}"
        if comment := COMMENT.fullmatch(line):
            if comment["kind"] == "test":
                raise DocumentError(f"{place}: no block is excepted; make it text or pycon")
            expected.append(comment["text"])
            continue
        if opening := FENCE.fullmatch(line):
            language = opening["language"]
            if language not in LANGUAGES and not DIRECTIVE.fullmatch(language):
                raise DocumentError(f"{place}: {language!r} is none of {sorted(LANGUAGES)}")
            text = _rest_of_block(lines, opening, place)
            if language not in LANGUAGES and any(map(FENCE.fullmatch, text.splitlines())):
                raise DocumentError(f"{place}: blocks inside {language} need ::: around them")
            yield Block(place, language, text, tuple(expected))
        elif expected:
            raise DocumentError(f"{place}: an expectation stands on the line above its block")
        expected = []


def _rest_of_block(lines: Iterator[tuple[int, str]], opening: re.Match[str], place: str) -> str:
    closing = re.compile(rf" *{opening['fence'][0]}{{{len(opening['fence'])},}}\s*")
    text: list[str] = []
    for _, line in lines:
        if closing.fullmatch(line):
            return "".join(text)
        text.append(line.removeprefix(opening["indent"]) + "\n")
    raise DocumentError(f"{place}: the block is not closed")


def commands_of(block: Block) -> list[Command]:
    """What is run of a terminal session."""
    commands: list[Command] = []
    lines = iter(block.text.splitlines())
    is_run = False
    for line in lines:
        if line.startswith(PROMPT):
            command = line.removeprefix(PROMPT).strip()
            while command.endswith("\\"):
                command += "\n" + next(lines, "").removeprefix("> ")
            is_run = RUNS_TENURE.search(command) is not None or command.startswith("export ")
            if is_run:
                commands.append(Command(command, 0))
        elif is_run and (said := EXIT.fullmatch(line.strip())):
            commands[-1] = Command(commands[-1].text, int(said["status"]))
    return commands


def script_for(commands: list[Command]) -> str:
    """One bash script, so that an `export` counts for the lines after it."""
    lines = ["set -o pipefail"]
    for command in commands:
        lines += [
            command.text,
            f"status=$?; if [ $status -ne {command.status} ]; then",
            f'  echo "exit status $status, not {command.status}: "{_quoted(command.text)} >&2',
            "  exit 1",
            "fi",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- running -------------------------------------------------------------------------------


def environment_in(folder: Path) -> dict[str, str]:
    """The person's environment, less what would let a block touch anything of theirs."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("TENURE_", "XDG_", "COV"))}
    binaries = str(Path(sys.executable).parent)
    return mine | {
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / ".state"),
        "PATH": os.pathsep.join([binaries, mine.get("PATH", os.defpath)]),
    }


def run(block: Block, folder: Path) -> str:
    """Run a block and return what it printed; what it leaves running is ended with it."""
    if block.language == "python":
        program = folder / "program.py"
        program.write_text(block.text, encoding="utf-8")
        command = [sys.executable, "-W", "error", str(program)]
    else:
        command = ["bash", "-c", script_for(commands_of(block))]
    # A file and not a pipe, which a process left running would keep open.
    output = folder / ".printed"
    with (
        output.open("wb") as printing,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment_in(folder),
            stdin=subprocess.DEVNULL,
            stdout=printing,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            ending = f"ended with status {process.wait(TIME_LIMIT)}"
        except subprocess.TimeoutExpired:
            ending = f"still ran after {TIME_LIMIT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    printed = output.read_text(encoding="utf-8", errors="replace")
    if process.returncode != 0:
        raise AssertionError(f"{block.place} {ending}; it printed:\n{printed}")
    return printed


def check(block: Block, folder: Path) -> None:
    """Run a block, and look for what it should print."""
    printed = run(block, folder)
    rest = printed
    for text in block.expected:
        _, found, rest = rest.partition(text)
        if not found:
            raise AssertionError(
                f"{block.place} did not print {text!r} in its turn; it printed:\n{printed}"
            )


# --- the documents -------------------------------------------------------------------------


def documents() -> list[Path]:
    readme = ROOT / "README.md"
    return ([readme] if readme.exists() else []) + sorted((ROOT / "docs").rglob("*.md"))


def read(path: Path) -> list[Block]:
    name = str(path.relative_to(ROOT))
    return list(blocks_of(name, path.read_text(encoding="utf-8")))


def runnable_blocks() -> Iterator[Block]:
    for path in documents():
        with contextlib.suppress(DocumentError):  # that is another test's to say
            for block in read(path):
                if block.language == "python" or (
                    block.language == "console" and commands_of(block)
                ):
                    yield block


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in documents()]
)
def test_a_document_can_be_read(path: Path) -> None:
    read(path)


def unmirrored(blocks: list[Block]) -> list[str]:
    """The asynchronous programs that are not followed by the same for threads."""
    programs = [block for block in blocks if block.language == "python"]
    return [
        block.place
        for block, following in zip_longest(programs, programs[1:])
        if "async def" in block.text
        and (following is None or "from tenure import blocking" not in following.text)
    ]


# What `tenure.testing` has is for tasks only.
FOR_TASKS_ONLY = {
    ROOT / "docs" / "evidence" / "simulation.md",
    ROOT / "docs" / "how-to" / "testing.md",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=str(p.relative_to(ROOT))) for p in documents() if p not in FOR_TASKS_ONLY],
)
def test_what_a_document_shows_for_tasks_it_shows_for_threads(path: Path) -> None:
    assert unmirrored(read(path)) == []


def tables(path: Path) -> list[str]:
    """The rows of its tables, with links as from the documentation's folder."""
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    in_the_checkout = re.compile(r", \[\S+\]\([A-Z]+\.md\)")
    shown = [in_the_checkout.sub("", row).replace("](docs/", "](") for row in rows]
    return [row for row in shown if "](SECURITY.md)" not in row]


def test_the_landing_page_lists_what_the_readme_lists() -> None:
    index = tables(ROOT / "docs" / "index.md")
    assert len(index) > 40
    assert index == tables(ROOT / "README.md")


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "index.md"])
def test_a_newcomer_sees_how_to_install_and_a_program_in_the_first_sixty_words(path: Path) -> None:
    words = path.read_text(encoding="utf-8").split()[:60]
    assert "install" in words
    assert 'client.mutex("nightly")' in words
    assert "asyncio.run(main())" in words


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with a_postgres() as url:
        yield url


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in runnable_blocks()])
def test_a_block_of_the_documents_runs(
    block: Block, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if POSTGRESQL in block.text:
        for name, value in jobs_database(request.getfixturevalue("postgres_url")).items():
            monkeypatch.setenv(name, value)
    check(block, tmp_path)


# --- the reader and the runner themselves --------------------------------------------------


def only_block(document: str) -> Block:
    (block,) = blocks_of("page.md", document)
    return block


def python(text: str, *expected: str) -> Block:
    return Block("page.md:1", "python", text, expected)


def console(text: str, *expected: str) -> Block:
    return Block("page.md:1", "console", text, expected)


@pytest.fixture
def tenure_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the real one: it says its arguments and exits with the last, if a number."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    program = binaries / "tenure"
    program.write_text("""#!/bin/sh
echo "tenure $* in $XDG_STATE_HOME for ${TENURE_URL-nobody}"
for last; do :; done
case "$last" in [0-9]*) exit "$last";; esac
""")
    program.chmod(0o755)
    (binaries / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))


def test_a_block_is_named_by_the_line_of_its_fence() -> None:
    document = "# Title\n\n```python\nprint(1)\n\nprint(2)\n```\n\n~~~text\nno\n~~~\n"
    assert list(blocks_of("docs/page.md", document)) == [
        Block("docs/page.md:3", "python", "print(1)\n\nprint(2)\n", ()),
        Block("docs/page.md:9", "text", "no\n", ()),
    ]


def test_a_program_that_is_not_mirrored_is_found() -> None:
    task, thread = python("async def main()"), python("from tenure import blocking")
    assert unmirrored([task, thread, thread, console("$ ls"), task, console("$ ls"), thread]) == []
    assert unmirrored([task, task, thread]) == unmirrored([thread, task]) == [task.place]


def test_a_document_without_blocks_has_none() -> None:
    assert list(blocks_of("page.md", "A line with `code` and ```more``` in it.\n")) == []


def test_a_block_in_a_list_loses_its_indentation() -> None:
    block = only_block("- one\n\n  ```python\n  if True:\n      print(1)\n  ```\n")
    assert block.text == "if True:\n    print(1)\n"


def test_a_block_in_a_tab_is_read() -> None:
    tab = ":::{tab-item} asyncio\n:sync: asyncio\n\n```python\nprint(1)\n```\n:::\n"
    assert only_block(f"::::{{tab-set}}\n\n{tab}::::\n").text == "print(1)\n"


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert only_block("````text\n```python\n```\n````\n").text == "```python\n```\n"


def test_expectations_stand_on_the_lines_above() -> None:
    block = only_block("<!-- expect: one -->\n<!-- expect: two, -- three -->\n```python\n```\n")
    assert block.expected == ("one", "two, -- three")


def test_an_expectation_is_for_one_block() -> None:
    document = "<!-- expect: one -->\n```python\n```\n```python\n```\n"
    assert [block.expected for block in blocks_of("page.md", document)] == [("one",), ()]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("<!-- test: skip it hangs -->\n```python\n```\n", "page.md:1: no block is excepted"),
        ("```py\n```\n", "page.md:1: 'py' is none of"),
        ("```\nnothing said\n```\n", "page.md:1: '' is none of"),
        ("text\n```python\nprint(1)\n", "page.md:2: the block is not closed"),
        (
            "````{tab-item} a\n```python\n```\n````\n",
            "page.md:1: blocks inside {tab-item} need :::",
        ),
        ("<!-- expect: one -->\n\n```python\n```\n", "page.md:2: an expectation stands"),
    ],
)
def test_a_slip_of_the_pen_is_an_error(document: str, complaint: str) -> None:
    with pytest.raises(DocumentError, match=re.escape(complaint)):
        list(blocks_of("page.md", document))


def test_of_a_session_only_what_runs_tenure_is_run() -> None:
    session = """\
$ pip install 'tenure[cli]'
installed
$ cd tenure
$ export TENURE_URL=sqlite:///jobs.db
$ tenure run --lock nightly -- \\
>     echo done
done
$ TENURE_URL=memory:// tenure ls | cat
$ python -m tenure ls
$ echo tenure
# exit 4
$ tenure run --lock busy --timeout 0 -- true
busy is held
# exit 75
"""
    assert commands_of(console(session)) == [
        Command("export TENURE_URL=sqlite:///jobs.db", 0),
        Command("tenure run --lock nightly -- \\\n    echo done", 0),
        Command("TENURE_URL=memory:// tenure ls | cat", 0),
        Command("python -m tenure ls", 0),
        Command("tenure run --lock busy --timeout 0 -- true", 75),
    ]


def test_a_program_prints_what_is_expected_of_it(tmp_path: Path) -> None:
    check(python("print('one')\nprint('two')", "one", "two"), tmp_path)


def test_expectations_are_met_in_their_order(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not print 'one' in its turn"):
        check(python("print('one')\nprint('two')", "two", "one"), tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("print('before'); 1 / 0", "page.md:1 ended with status 1; it printed:\nbefore\n"),
        ("import warnings; warnings.warn('old')", "UserWarning: old"),
    ],
)
def test_a_program_that_fails_is_shown(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        check(python(text), tmp_path)


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_documents.TIME_LIMIT", 0.2)
    with pytest.raises(AssertionError, match=r"page\.md:1 still ran after 0\.2 s"):
        check(python("import time; time.sleep(3600)"), tmp_path)


def test_a_program_finds_nothing_of_the_persons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_URL", "sqlite:////home/me/precious.db")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/me")
    names = ["TENURE_URL", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"]
    text = f"import os\nprint(os.getcwd(), *(os.environ.get(name) for name in {names}))"
    check(python(text, f"{tmp_path} None None {tmp_path}/.state {tmp_path}\n"), tmp_path)


@pytest.mark.usefixtures("tenure_command")
def test_a_session_runs_line_by_line_in_one_shell(tmp_path: Path) -> None:
    session = """\
$ tenure node create /billing
$ export TENURE_URL=sqlite:///jobs.db
$ tenure run \\
>     --lock "it's" 7
# exit 7
$ tenure ls | tr a-z A-Z
"""
    expected = [
        f"tenure node create /billing in {tmp_path}/.state for nobody\n",
        f"tenure run --lock it's 7 in {tmp_path}/.state for sqlite:///jobs.db\n",
        "TENURE LS",
    ]
    check(console(session, *expected), tmp_path)


@pytest.mark.usefixtures("tenure_command")
@pytest.mark.parametrize(
    ("session", "complaint"),
    [
        ("$ tenure fail 3\n$ tenure ls\n", "exit status 3, not 0: tenure fail 3\n"),
        ("$ tenure 3 | cat\n", "exit status 3, not 0: tenure 3 | cat\n"),
        ("$ tenure ls\n# exit 1\n", "exit status 0, not 1: tenure ls\n"),
        ("$ tenure it\\'s 2\n", "exit status 2, not 0: tenure it\\'s 2\n"),
    ],
)
def test_a_session_ends_at_the_first_unexpected_status(
    session: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=re.escape(complaint) + "$"):
        check(console(session), tmp_path)


@pytest.mark.usefixtures("tenure_command")
def test_what_a_session_leaves_running_is_ended(tmp_path: Path) -> None:
    session = '$ tenure ls && sleep 3600 & echo "left $!"\n'
    printed = run(console(session), tmp_path)
    left = re.search(r"left (\d+)", printed)
    assert left
    assert_ends(int(left[1]))


def assert_ends(pid: int) -> None:
    """A killed process goes soon, but in its own time; the hang guard is the limit."""
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        os.sched_yield()
