"""What a table of quotas may say."""

from __future__ import annotations

import pytest

from tenure import InvalidArgument
from tenure.server.auth.identity import UNSET, Quotas


def test_quotas_are_read_by_name_with_a_dash_or_without() -> None:
    read = Quotas.parse({"sessions": 5, "stored-bytes": 1_000, "nodes": 0})
    assert read == Quotas(sessions=5, stored_bytes=1_000, nodes=0)
    assert Quotas.parse({"stored_bytes": 1_000}) == Quotas(stored_bytes=1_000)


def test_what_is_not_set_is_left_to_the_servers_limits() -> None:
    assert Quotas.parse(None) is UNSET
    assert Quotas.parse({}) == UNSET
    assert Quotas.parse({"watches": 3}).sessions is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"locks": 5}, "there is no quota 'locks'; the quotas are sessions, requests, semaphores"),
        ({"sessions": -1}, "the quota sessions is a whole number of at least 0, not -1"),
        ({"sessions": True}, "not True"),
        ({"stored-bytes": "1 MiB"}, "the quota stored_bytes is .* not '1 MiB'"),
        ({"sessions": 1.5}, "not 1.5"),
        ({"sessions": None}, "the quota sessions has no value"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_place(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as refused:
        Quotas.parse(given, where="tokens.toml, identity 'billing'")
    assert str(refused.value).startswith("tokens.toml, identity 'billing': ")
