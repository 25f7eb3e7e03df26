"""What `tenure doctor` finds out about a cluster."""

from __future__ import annotations

from tenure.doctor import examine
from tenure.engines import diagnose
from tests.engines.etcd.servers import a_cluster, free_port


def test_members_are_examined_one_by_one_and_then_what_they_agree_on() -> None:
    with a_cluster() as cluster:
        [member, majority] = diagnose(f"{cluster.url}?prefix=unused")
        assert member.level in {"ok", "warning"}  # Debian's etcd is old
        assert member.found.startswith(f"{cluster.members[0].address}: etcd 3.")
        assert (majority.level, majority.absent) == ("ok", True)
        assert cluster.keys() == {}


def test_one_member_that_is_down_is_a_warning_and_all_of_them_a_failure() -> None:
    port = free_port()
    with a_cluster() as cluster:
        found = list(diagnose(f"etcd://127.0.0.1:{port},{cluster.members[0].address}"))
        assert (found[0].level, found[-1].level) == ("warning", "ok")
        assert str(port) in found[0].found
    [alone] = diagnose(f"etcd://127.0.0.1:{port}")
    assert alone.level == "failure"
    assert alone.found.startswith(f"127.0.0.1:{port}: cannot be reached")


def test_a_member_without_the_others_is_no_majority() -> None:
    with a_cluster(3) as cluster:
        for member in cluster.members[1:]:
            member.kill()
        *_, last = diagnose(cluster.url)
        assert (last.level, last.what) == ("failure", "majority")


def test_a_mistake_in_the_url_is_a_finding_too() -> None:
    *_, found = examine("etcd://a?prefx=b")
    assert (found.level, found.what) == ("failure", "engine")
    assert "prefx" in found.found
