"""How a limit of the server is divided among identities."""

from __future__ import annotations

import pytest

from tenure.server.auth.accounts import Account, Accounts
from tenure.server.auth.identity import Identity, Quotas
from tenure.server.limits import LimitReached, Limits


def identity(name: str, **quotas: int) -> Identity:
    return Identity(name, "token", quotas=Quotas(**quotas))


def fill(account: Account, *, expected: int) -> None:
    """Take sessions until there are no more, which is so after that many."""
    for _ in range(expected):
        account.sessions.take()
    with pytest.raises(LimitReached, match="sessions"):
        account.sessions.take()


def test_the_only_identity_may_have_all_that_the_server_has() -> None:
    only = Accounts(Limits(sessions=10)).of(identity("only"))
    with pytest.raises(LimitReached, match="this server has reached its limit sessions = 10; try"):
        fill(only, expected=11)
    assert only.sessions.used == 10


def test_one_identity_takes_what_is_shared_and_leaves_the_others_their_parts() -> None:
    accounts = Accounts(Limits(sessions=16))
    greedy, modest, third, fourth = (accounts.of(identity(name)) for name in "abcd")
    fill(greedy, expected=8 + 2)  # half of all is shared, and an eighth is its own
    for other in (modest, third, fourth):
        fill(other, expected=2)
    with pytest.raises(LimitReached, match="the identity b has more than its reserved share"):
        modest.sessions.take()
    greedy.sessions.release(3)
    fill(modest, expected=3)


def test_a_newcomer_gets_its_part_also_when_the_server_is_full() -> None:
    accounts = Accounts(Limits(sessions=16))
    first = accounts.of(identity("first"))
    fill(first, expected=16)
    newcomer = accounts.of(identity("newcomer"))
    fill(newcomer, expected=4)
    first.sessions.release(13)
    fill(newcomer, expected=8)
    fill(first, expected=1)


def test_a_quota_is_named_in_the_refusal_and_holds_below_what_is_shared() -> None:
    accounts = Accounts(Limits())
    account = accounts.of(identity("billing", sessions=2, nodes=0))
    fill(account, expected=2)
    with pytest.raises(LimitReached) as caught:
        account.sessions.take(node="/n", name="m")
    assert str(caught.value).startswith(
        "the identity billing has reached its quota sessions = 2; end something"
    )
    assert (caught.value.limit, caught.value.node, caught.value.name) == ("sessions", "/n", "m")
    with pytest.raises(LimitReached, match="quota nodes = 0"):
        account.nodes.take()


def test_what_exists_already_is_counted_beyond_the_quota() -> None:
    account = Accounts(Limits()).of(identity("billing", sessions=1))
    account.sessions.take_anyway(3)
    account.sessions.release(2)
    with pytest.raises(LimitReached):
        account.sessions.take()
    account.sessions.release()
    account.sessions.take()


def test_another_quota_applies_to_an_account_that_is_in_use() -> None:
    accounts = Accounts(Limits(sessions=100))
    account = accounts.of(identity("billing", sessions=5))
    fill(account, expected=5)
    assert accounts.of(identity("billing", sessions=2)) is account
    with pytest.raises(LimitReached, match="quota sessions = 2"):
        account.sessions.take()
    account.sessions.release(4)
    fill(account, expected=1)
    accounts.of(identity("billing"))
    fill(account, expected=98)


def test_an_account_is_gone_with_the_last_that_refers_to_it_and_its_part_with_it() -> None:
    accounts = Accounts(Limits(sessions=16))
    stays = accounts.of(identity("stays"))
    others = [accounts.of(identity(f"other {n}")) for n in range(7)]
    assert len(accounts) == 8
    fill(stays, expected=8 + 1)
    others.clear()
    assert len(accounts) == 1
    fill(stays, expected=7)
    assert stays.sessions.used == 16


def test_names_of_different_kinds_are_different_identities() -> None:
    accounts = Accounts(Limits())
    token = accounts.of(Identity("uid 0", "token"))
    peer = accounts.of(Identity("uid 0", "uid"))
    assert token is not peer


def test_more_than_was_taken_is_not_given_back() -> None:
    account = Accounts(Limits()).of(identity("a"))
    with pytest.raises(AssertionError, match="more sessions released"):
        account.sessions.release()


def test_what_belongs_to_no_identity_leaves_less_for_those_that_ask_first() -> None:
    accounts = Accounts(Limits(nodes=16))
    accounts.unowned.nodes.take_anyway(5)
    first = accounts.of(identity("first"))
    first.nodes.take(11)
    with pytest.raises(LimitReached, match="this server has reached its limit nodes = 16; try"):
        first.nodes.take()
    second = accounts.of(identity("second"))
    second.nodes.take(4)  # its part is reserved
    with pytest.raises(LimitReached, match="second has more than its reserved share"):
        second.nodes.take()
    first.nodes.release(11)
    second.nodes.take(3)  # 8 are shared, less the 5
    with pytest.raises(LimitReached):
        second.nodes.take()
    accounts.unowned.nodes.release(5)
    second.nodes.take(5)
    with pytest.raises(LimitReached):
        second.nodes.take()


def test_an_only_identity_gets_what_is_deleted_of_no_identity() -> None:
    accounts = Accounts(Limits(nodes=4))
    only = accounts.of(identity("only"))
    accounts.unowned.nodes.take_anyway(6)
    with pytest.raises(LimitReached):
        only.nodes.take()
    accounts.unowned.nodes.release(4)
    only.nodes.take(2)
    with pytest.raises(LimitReached):
        only.nodes.take()
