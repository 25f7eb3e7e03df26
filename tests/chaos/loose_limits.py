"""`chaos.worker` with two defects of limits.

The tokens of a key are released with the grant, so that a key gets more than its limit. A take of a
rate is used before the time of its grant.
"""

from __future__ import annotations

from chaos.worker import main
from tenure._client import semaphore
from tenure._client.lease import Lease
from tenure._client.rate import Rate
from tenure._client.request import Request
from tenure.core.rates import RateAnswer, RateCall

_lease_of, _answer = semaphore._lease_of, Rate._answer


def _with_the_key_released(request: Request, place: Request) -> Lease:
    place.abandon()
    return _lease_of(request, place)


async def _at_once(self: Rate, call: RateCall) -> RateAnswer:
    answer = await _answer(self, call)
    if call.kind == "take" and answer.wait:
        return answer._replace(granted=True, at=answer.at - answer.wait or 1, wait=0)
    return answer


if __name__ == "__main__":
    semaphore._lease_of = _with_the_key_released
    Rate._answer = _at_once  # type: ignore[method-assign]
    main()
