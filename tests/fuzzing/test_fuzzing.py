"""A short part of the fuzzing with fixed seeds, what it has found so far, and the fuzzer itself."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys

import pytest

from tenure.engines.sqlite.url import parse
from tests.fuzzing.checks import Finding, Run, Target, run_one
from tests.fuzzing.mutations import LARGEST, mutated, pieces
from tests.fuzzing.parsers import PARSERS
from tests.fuzzing.servers import serving
from tests.fuzzing.settings import FILES
from tests.fuzzing.stores import stores

TARGETS = {target.name: target for target in (*PARSERS, *FILES)}
MANY = b"9" * 5000  # digits, more than Python reads as a number

FOUND = [
    ("configuration", b"listen = " + b"[" * 20_000),
    ("configuration", b"max-sessions = " + MANY),
    ("dflockd-replies", b"acquired 0123456789abcdef " + MANY + b"\n"),
    ("dflockd-replies", b"ok  \n"),
    ("etcd-answers", b"\x0a"),
    ("etcd-answers", b"\x08" + b"\xff" * LARGEST),
    ("etcd-answers", b"\x0a\x02\x08\x05\x20\x02"),
    ("etcd-answers", b"\x12\x02\xd2\x01"),
    ("listeners", b"ydb://:2136?endpoint=a:" + MANY),
    ("listeners", b"tenure://:" + MANY),
    ("token-files", b"[tokens.a]\nquotas = { sessions = " + MANY + b" }"),
    ("token-files", b"[tokens.a]\nquotas = " + b"[" * 20_000),
    ("token-files", b"[uids." + MANY + b"]\n"),
    ("urls", b"dflockd://a:" + MANY),
    ("urls", b"etcd://a:" + MANY),
    ("urls", b"redis://a/" + MANY),
    ("urls", b"sqlite:////tmp/\xff.db"),
    ("urls", b"tenure://a?busy-poll=" + MANY),
    ("urls", b"ydb://a:" + MANY + b"/local"),
]


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_refuses_changed_inputs_with_documented_errors(name: str) -> None:
    for data in itertools.islice(TARGETS[name].inputs("tests"), 300):
        run_one(TARGETS[name], data)


@pytest.mark.parametrize("which", [0, 1], ids=["stores", "backups"])
def test_a_changed_file_is_refused_with_documented_errors(which: int) -> None:
    target = stores()[which]
    for data in itertools.islice(target.inputs("tests"), 25):
        run_one(target, data)


def test_a_server_serves_its_clients_beside_changed_conversations() -> None:
    with serving() as targets:
        for target in targets:
            for data in itertools.islice(target.inputs("tests"), 100):
                run_one(target, data)


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_stays_away(name: str, data: bytes) -> None:
    run_one(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_samples_are_well_formed(name: str) -> None:
    """Or else every change of them would be refused for the same reason."""
    accepted = 0
    for data in TARGETS[name].seeds:
        try:
            TARGETS[name].run(data, random.Random(0))
        except TARGETS[name].refuses:
            continue
        accepted += 1
    assert accepted >= 1


def test_a_path_with_bytes_that_are_no_text_names_its_file() -> None:
    assert os.fsencode(parse("sqlite:////tmp/\udcff%20x.db").path) == b"/tmp/\xff x.db"


# The fuzzer


def test_a_seed_gives_the_same_inputs_again() -> None:
    target = TARGETS["urls"]
    first = list(itertools.islice(target.inputs("a"), 200))
    assert first == list(itertools.islice(target.inputs("a"), 200))
    assert first != list(itertools.islice(target.inputs("b"), 200))
    assert len(set(first)) > 150


def test_inputs_are_bounded_and_pieces_are_the_whole() -> None:
    chance = random.Random(1)
    for _ in range(500):
        data = mutated(chance, (b"abc 123", bytes(LARGEST)))
        assert len(data) <= LARGEST
        assert b"".join(pieces(chance, data)) == data


def _raise(data: bytes, _: random.Random) -> None:
    if b"\xff" in data:
        raise KeyError("planted")


def _hang(_data: bytes, _: random.Random) -> None:
    sum(range(10**7))


@pytest.mark.parametrize(("run", "said"), [(_raise, "planted"), (_hang, "it took .* s")])
def test_what_goes_wrong_is_found(run: Run, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.checks.SLOW", 0.02)
    with pytest.raises(Finding, match=said):
        run_one(Target("planted", run, ()), b"\xff")


GROWING = """
from tests.fuzzing import checks

def grow(_data, _random):
    assert len(b"x" * (64 << 20))

checks.MEMORY = 16
for _ in range(2):  # each input for itself
    try:
        checks.run_one(checks.Target("planted", grow, ()), b"")
    except checks.Finding as finding:
        print(finding)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_memory_is_measured() -> None:
    # In a process of its own: here the garbage of other tests may be freed meanwhile.
    command = [sys.executable, "-c", GROWING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"(planted: it took 6. MiB for 0 bytes\n){2}", done.stdout)


def test_the_command_prints_its_seed_and_repeats_an_input() -> None:
    command = [sys.executable, "-m", "tests.fuzzing", "stored"]
    done = subprocess.run(
        [*command, "--seconds", "0", "--seed", "abc"], capture_output=True, text=True, check=True
    )
    assert "--seed abc" in done.stdout
    assert "stored" in done.stdout
    done = subprocess.run([*command, "--input", "AAAA"], capture_output=True, text=True, check=True)
    assert done.stdout == "nothing is found\n"
