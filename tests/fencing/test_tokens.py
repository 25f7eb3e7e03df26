"""What a fence takes for a token and for a name, and how it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import tenure
from tenure import blocking
from tenure.errors import InvalidArgument, StaleToken, Unsupported
from tenure.fencing import Fence
from tenure.fencing.tokens import TOKENS_END, name_of, stale, token_of


class WithoutTokens:
    @property
    def fencing_token(self) -> int:
        raise Unsupported("this store has no order")


@pytest.mark.parametrize("number", [0, 1, 2**31, 2**53 - 1])
def test_an_integer_is_a_token(number: int) -> None:
    assert token_of(number) == number


@pytest.mark.parametrize("wrong", [-1, 2**53, 2**63, True, False, 1.0, "7", b"7", None, object()])
def test_what_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="fencing token"):
        token_of(wrong)


async def test_a_lease_has_one_and_so_has_a_leadership() -> None:
    fence = Fence("x")
    async with tenure.connect("memory://tokens") as client:
        async with client.mutex("m").lock() as lease:
            fence.admit(lease)
            assert fence.newest == lease.fencing_token < TOKENS_END
        await client.semaphore("e").create(limit=1)
        async with client.election("e").campaign(b"me") as leadership:
            fence.admit(leadership)
            assert fence.newest == leadership.fencing_token
        with pytest.raises(StaleToken):
            fence.admit(lease)


def test_a_lease_of_a_thread_has_one() -> None:
    fence = Fence("x")
    with (
        blocking.connect("memory://tokens-of-threads") as client,
        client.mutex("m").lock() as lease,
    ):
        fence.admit(lease)
        assert fence.newest == lease.fencing_token


def test_a_lease_of_a_store_that_has_none_says_so() -> None:
    with pytest.raises(Unsupported, match="no order"):
        token_of(WithoutTokens())


@pytest.mark.parametrize("wrong", ["", "x" * 256, "a\0b", 7, None, b"x"])
def test_what_is_no_name_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="resource"):
        name_of(wrong)


def test_a_refusal_says_what_happened_and_what_to_do() -> None:
    error = stale("invoices", 33, 34)
    assert (error.resource, error.token, error.newest) == ("invoices", 33, 34)
    text = str(error)
    assert "'invoices'" in text
    assert "token 33" in text
    assert "token 34" in text
    assert "acquire again" in text
    assert "a newer token" in str(stale("invoices", 33, None))


def test_a_refusal_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(stale("invoices", 33, 34)))
    assert (error.resource, error.token, error.newest) == ("invoices", 33, 34)
