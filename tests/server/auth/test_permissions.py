"""Which node a permission covers, and what is refused in a table of them."""

from __future__ import annotations

import pytest

from tenure import InvalidArgument
from tenure.server.auth.identity import EVERYTHING, Access, Permissions

RULES = {
    "/billing": "hold",
    "/billing/secret": "none",
    "/billing/jobs/nightly": "administer",
    "/shared": "read",
}


@pytest.mark.parametrize(
    ("node", "level"),
    [
        ("/billing", Access.HOLD),
        ("/billing/jobs", Access.HOLD),
        ("/billing/jobs/nightly", Access.ADMINISTER),
        ("/billing/jobs/nightly/x", Access.ADMINISTER),
        ("/billing/jobs/nightly2", Access.HOLD),
        ("/billing/secret", Access.NONE),
        ("/billing/secret/inner", Access.NONE),
        ("/billing2", Access.NONE),
        ("/bill", Access.NONE),
        ("/shared/a/b/c", Access.READ),
        ("/default", Access.NONE),
        ("/BILLING", Access.NONE),
    ],
)
def test_the_longest_prefix_of_whole_components_decides(node: str, level: Access) -> None:
    assert Permissions.parse(RULES).access(node) is level


def test_a_rule_for_the_root_covers_every_other_node() -> None:
    permissions = Permissions.parse({"/": "read", "/mine": "administer"})
    assert permissions.access("/default") is Access.READ
    assert permissions.access("/mine/x") is Access.ADMINISTER


def test_levels_include_those_below_them() -> None:
    assert Access.ADMINISTER > Access.HOLD > Access.READ > Access.NONE


def test_no_permissions_allow_everything_and_an_empty_table_allows_nothing() -> None:
    assert Permissions.parse(None) is EVERYTHING
    assert EVERYTHING.access("/default") is Access.ADMINISTER
    assert Permissions.parse({}).access("/default") is Access.NONE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"billing": "hold"}, "starts with '/'"),
        ({"/billing/": "hold"}, "no '/' at its end"),
        ({"/bil*": "hold"}, "segment"),
        ({"/billing": "write"}, "one of none, read, hold, administer, not 'write'"),
        ({"/billing": 2}, "not 2"),
        ({"/billing": ["hold"]}, "not \\['hold'\\]"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_place(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as refused:
        Permissions.parse(given, where="tokens.toml, identity 'billing'")
    assert str(refused.value).startswith("tokens.toml, identity 'billing': ")
