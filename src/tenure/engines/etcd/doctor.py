"""Findings of `tenure doctor` on an ``etcd://`` URL: its members, their agreement, the prefix.

Nothing is changed, and a prefix that is not there is not made. All that is asked is asked of one
member after the other, in a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tenure.clock import SystemClock
from tenure.engines.contract import Finding
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.keys import Keys
from tenure.engines.etcd.members import Lost, Members, Refused, failure
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import TenureError

__all__ = ["examine"]

_PATIENCE = 2.0
"""Seconds for each thing that is asked."""
_SLOW = 0.1
"""Seconds of a round trip above which something is wrong."""
_SOUND = {(3, 4): 31, (3, 5): 13}
"""From which patch on a former leader leaves leases alone; all of later lines do."""


def examine(address: EtcdUrl) -> Iterator[Finding]:
    """Everything about the store at a URL. Raises nothing of tenure's own."""
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
        # One that is down costs nothing as long as most of them are there.
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
        answer = await members.call_member(turn, wire.STATUS, b"", _PATIENCE)
    except Lost as lost:
        why = str(lost).removeprefix(f"{endpoint} ")
        return Finding("failure", what, f"{endpoint}: {why}", "start it, or take it out of the URL")
    except Refused as refused:
        return Finding("failure", what, f"{endpoint}: {failure(address.url, refused)}")
    except TenureError as error:
        return Finding("failure", what, f"{endpoint}: {error}")
    took = clock.now() - began
    version, trouble = answers.read_string(answer, 2), answers.read_string(answer, 8)
    told = f"{endpoint}: etcd {version}, answers in {took * 1000:.0f} ms"
    if trouble:
        return Finding("failure", what, f"{told}: {trouble}", "see etcdctl alarm list")
    if not _is_sound(version):
        return Finding(
            *("warning", what, f"{told}; a former leader may revoke leases (etcd issue 15247)"),
            "update it to 3.4.31, 3.5.13 or later",
        )
    if took > _SLOW:
        return Finding("warning", what, told, "look at its disk, its load, and the way to it")
    return Finding("ok", what, told)


def _is_sound(version: str) -> bool:
    numbers = [int(each) for each in version.partition("-")[0].split(".") if each.isdigit()]
    if len(numbers) < 3:
        return False
    line = (numbers[0], numbers[1])
    return line > max(_SOUND) or numbers[2] >= _SOUND.get(line, 1 << 30)


async def _majority(members: Members, address: EtcdUrl) -> Finding:
    """Compare the members, and look at the prefix."""
    keys, what = Keys(address.prefix), "majority"
    request = wire.txn(
        (),
        (
            wire.get(wire.range_(keys.base)),
            wire.get(wire.range_(keys.nodes, wire.after(keys.nodes), keys_only=True)),
        ),
    )
    why = ""
    for turn in range(len(members)):
        try:
            data = await members.call_member(turn, wire.TXN, request, _PATIENCE)
        except Lost as lost:
            why = str(lost)
        except (Refused, TenureError) as error:
            told = failure(address.url, error) if isinstance(error, Refused) else error
            return Finding("failure", what, str(told))
        else:
            base, nodes = answers.read_answer(data).parts
            prefix = address.prefix.rstrip("/")
            if base.first is None:
                return Finding("ok", what, f"there is one; nothing is under {prefix}", absent=True)
            return Finding("ok", what, f"there is one; nodes under {prefix}: {nodes.count}")
    return Finding("failure", what, f"unknown ({why})", "start more of its members")
