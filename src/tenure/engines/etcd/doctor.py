"""Findings of `tenure doctor` on an ``etcd://`` URL: its members, their majority, the prefix.

The diagnosis changes nothing. It queries the members one after the other, in a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tenure.clock import SystemClock
from tenure.engines.contract import Finding
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import Lost, Refused, failure
from tenure.engines.etcd.keys import Keys
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import TenureError

_TIMEOUT = 2.0
"""Seconds for each query."""
_SLOW = 0.1
"""Seconds; a longer round trip gets a warning."""
_SOUND = {(3, 4): 31, (3, 5): 13}
"""First patch release, by minor release, whose former leaders revoke no leases. Later minor
releases are not affected."""


def examine(address: EtcdUrl) -> Iterator[Finding]:
    """Examine the store at a URL. Raises no `TenureError`."""
    try:
        findings = asyncio.run(_examined(address))
    except TenureError as error:
        findings = [Finding("failure", "cluster", str(error))]
    yield from findings


async def _examined(address: EtcdUrl) -> list[Finding]:
    members = Members(address)
    members.open()
    try:
        found = [await _member(members, turn, address) for turn in range(len(members))]
        if all(each.level == "failure" for each in found):
            return found
        # Failed members are no problem while there is a majority.
        found = [
            Finding("warning", each.what, each.found, each.remedy)
            if each.level == "failure"
            else each
            for each in found
        ]
        return [*found, await _majority(members, address)]
    finally:
        await members.aclose()


async def _member(members: Members, turn: int, address: EtcdUrl) -> Finding:
    clock, what, endpoint = SystemClock(), "member", address.endpoints[turn]
    began = clock.now()
    try:
        answer = await members.call_member(turn, wire.STATUS, b"", _TIMEOUT)
    except Lost as lost:
        why = str(lost).removeprefix(f"{endpoint} ")
        return Finding("failure", what, f"{endpoint}: {why}", "start it, or take it out of the URL")
    except Refused as refused:
        return Finding("failure", what, f"{endpoint}: {failure(address.url, refused)}")
    except TenureError as error:
        return Finding("failure", what, f"{endpoint}: {error}")
    took = clock.now() - began
    version, trouble = answers.read_string(answer, 2), answers.read_string(answer, 8)
    found = f"{endpoint}: etcd {version}, answers in {took * 1000:.0f} ms"
    if trouble:
        return Finding("failure", what, f"{found}: {trouble}", "see etcdctl alarm list")
    if not _is_sound(version):
        return Finding(
            *("warning", what, f"{found}; a former leader may revoke leases (etcd issue 15247)"),
            "update it to 3.4.31, 3.5.13 or later",
        )
    if took > _SLOW:
        return Finding("warning", what, found, "check its disk, its load and the network")
    return Finding("ok", what, found)


def _is_sound(version: str) -> bool:
    numbers = [int(each) for each in version.partition("-")[0].split(".") if each.isdigit()]
    if len(numbers) < 3:
        return False
    line = (numbers[0], numbers[1])
    return line > max(_SOUND) or numbers[2] >= _SOUND.get(line, 1 << 30)


async def _majority(members: Members, address: EtcdUrl) -> Finding:
    """Read the prefix from a majority."""
    keys, what = Keys(address.prefix), "majority"
    request = wire.txn(
        (),
        (
            wire.get(keys.base),
            wire.get_all(keys.nodes, keys_only=True),
        ),
    )
    why = ""
    for turn in range(len(members)):
        try:
            data = await members.call_member(turn, wire.TXN, request, _TIMEOUT)
        except Lost as lost:
            why = str(lost)
        except (Refused, TenureError) as error:
            cause = failure(address.url, error) if isinstance(error, Refused) else error
            return Finding("failure", what, str(cause))
        else:
            base, nodes = answers.read_answer(data).parts
            prefix = address.prefix.rstrip("/")
            if base.first is None:
                return Finding("ok", what, f"there is one; nothing is under {prefix}", absent=True)
            return Finding("ok", what, f"there is one; nodes under {prefix}: {nodes.count}")
    return Finding("failure", what, f"unknown ({why})", "start more of its members")
