"""What the tests' own members of etcd do when they are asked."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

import pytest

from tests.engines.etcd.servers import a_cluster


def test_three_members_choose_another_leader_when_theirs_is_killed() -> None:
    with a_cluster(3) as cluster:
        former = cluster.leader()
        former.kill()
        assert cluster.leader() is not former
        cluster.heal()
        assert all(member.healthy() for member in cluster.members)
        assert cluster.leader() is not former


def test_an_administrator_sees_keys_and_leases_and_ends_them() -> None:
    with a_cluster() as cluster:
        cluster.ask("lease/grant", {"ID": "77", "TTL": "60"})
        cluster.ask("kv/put", {"key": "YS8x", "value": "eA==", "lease": "77"})
        cluster.ask("kv/put", {"key": "YS8y", "value": "eA=="})
        assert cluster.leases() == [77]
        assert cluster.keys("a/") == {"a/1": 77, "a/2": 0}
        cluster.revoke(77)
        assert cluster.keys() == {"a/2": 0}
        cluster.compact()
        assert cluster.delete("a/") == 1
        assert cluster.keys() == {}


def test_a_user_who_guesses_the_password_gets_no_token() -> None:
    with a_cluster() as cluster:
        cluster.have_users(root="secret", anna="word")
        token = cluster.token("anna", "word")
        assert cluster.ask("kv/put", {"key": "YQ==", "value": "eA=="}, token=token)
        with pytest.raises(urllib.error.HTTPError):
            cluster.token("anna", "guess")


def test_a_client_without_a_certificate_hears_nothing_where_one_is_asked_for() -> None:
    with a_cluster(tls=True) as cluster:
        [member] = cluster.members
        assert cluster.keys() == {}
        assert member.secrets is not None
        stranger = ssl.create_default_context(cafile=member.secrets[1])
        with pytest.raises(OSError):  # noqa: PT011  which, depends on how far it gets
            urllib.request.urlopen(f"https://{member.address}/version", context=stranger)
