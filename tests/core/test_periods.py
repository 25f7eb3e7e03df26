"""The rule of `once`, as a state machine without I/O, against a list of all runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenure.core.periods import RunRecord, decode, encode

PERIOD = 100.0

times = st.floats(0, 4e9, allow_nan=False)
records = st.builds(
    RunRecord, times, st.integers(0, 2**53), st.text(max_size=20), st.none() | times
)


@dataclass
class Run:
    at: float
    succeeded: bool


@st.composite
def callers(draw: st.DrawFn) -> list[tuple[float, bool, bool]]:
    """When callers come, whether their run would succeed, and whether failed ones count."""
    return draw(
        st.lists(
            st.tuples(st.floats(0, 250), st.booleans(), st.booleans()), min_size=1, max_size=30
        )
    )


@given(callers())
def test_a_run_begins_exactly_when_no_run_counts_within_the_period(
    comers: list[tuple[float, bool, bool]],
) -> None:
    now, record, runs = 1000.0, None, list[Run]()
    for token, (later, succeeds, count_failed) in enumerate(comers, 1):
        now += later
        wait = 0.0 if record is None else record.due_in(now, PERIOD, count_failed=count_failed)
        counted = [run for run in runs if run.succeeded or count_failed]
        assert (wait > 0) is any(now - run.at < PERIOD for run in counted)
        if wait > 0:
            assert now + wait == pytest.approx(counted[-1].at + PERIOD)
            continue
        mine = RunRecord(now, token, "me")
        record = mine if record is None else record.begin(now, token, "me")
        assert not record.done
        if succeeds:
            record = record.succeed()
            assert record.done
        runs.append(Run(now, succeeds))


@example(RunRecord(1.6210010647773743, 0, "", 536870914.0), 536870913.9108635, 1.0, False)
@given(records, times, st.floats(1e-3, 1e6), st.booleans())
def test_a_record_of_the_future_counts_as_now(
    record: RunRecord, now: float, period: float, count_failed: bool
) -> None:
    wait = record.due_in(now, period, count_failed=count_failed)
    assert 0 <= wait <= period
    known = record.clamped(now)
    assert known.started <= now
    assert known.succeeded is None or known.succeeded <= now
    assert known.due_in(now, period, count_failed=count_failed) == wait
    # Once it is stored so, a period later it is due, whatever the clock was before.
    assert known.due_in(now + 2 * period, period, count_failed=count_failed) == 0


@pytest.mark.parametrize("now", [500.0, 1005.0, 2000.0])
def test_a_run_that_failed_is_no_success_after_the_clock_was_set_back(now: float) -> None:
    failed = RunRecord(1010.0, 2, "me", succeeded=1000.0)
    assert not failed.clamped(now).done
    assert replace(failed, succeeded=1010.0).clamped(now).done


@given(records)
def test_a_record_is_decoded_as_it_was_encoded(record: RunRecord) -> None:
    assert decode(encode(record)) == record


def test_no_data_is_no_run() -> None:
    assert decode(b"") is None


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\xff",
        b"[" * 100_000,
        b"7",
        b"{}",
        b'{"v":2,"started":1,"token":1,"by":"a"}',
        b'{"v":1,"started":"1","token":1,"by":"a"}',
        b'{"v":1,"started":NaN,"token":1,"by":"a"}',
        b'{"v":1,"started":1,"token":1.5,"by":"a"}',
        b'{"v":1,"started":1,"token":1,"by":1}',
        b'{"v":1,"started":1,"token":1,"by":"a","succeeded":"1"}',
        b'{"v":1,"started":true,"token":1,"by":"a"}',
    ],
)
def test_what_is_no_record_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


@given(st.binary(max_size=50))
def test_any_bytes_are_a_record_or_an_error(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return
