"""End of the block of a lease or of a ticket.

The end withdraws or releases the request. Its failure never hides the body's error, and a cancelled
body does not wait for the store.
"""

from __future__ import annotations

import asyncio
from functools import partial

from tenure._client.request import Request
from tenure._client.request_states import HELD
from tenure._client.scope import note_failure
from tenure.engines.contract import Withdrawn
from tenure.errors import LeaseLost, SessionExpired


def start_leaving(
    handle: object, request: Request, error: BaseException | None
) -> asyncio.Future[Withdrawn] | None:
    """Withdraw the request unless it is lost; return the answer to wait for."""
    if isinstance(error, GeneratorExit):
        # From any thread. The handle lives until then, so that it is not dropped while it is held.
        request.session.client.soon(partial(_withdraw, handle, request))
        return None
    try:
        if request.state is not HELD or request.held:
            answer = request.withdraw()
            if not isinstance(error, asyncio.CancelledError):
                return answer  # a cancelled task does not wait for the store
    except Exception as failure:
        _note(request, error, failure)
    return None


def _withdraw(_handle: object, request: Request) -> None:
    request.withdraw()


async def finish_leaving(
    request: Request, answer: asyncio.Future[Withdrawn], error: BaseException | None
) -> None:
    """Wait for the answer, and report a failure of the store.

    After the session has ended, a failure is ignored: the end releases everything.
    """
    await request.answered_by_store(answer)
    _report(request, answer, error)


def _report(
    request: Request, answer: asyncio.Future[Withdrawn], error: BaseException | None
) -> None:
    if request.session.why is None:
        failure = answer.exception()
        if failure is not None:
            assert isinstance(failure, Exception)
            _note(request, error, failure)


def note_loss(request: Request, error: BaseException) -> None:
    """Note the loss on the body's own error, unless that error reports a loss itself."""
    if not isinstance(error, asyncio.CancelledError | LeaseLost | SessionExpired):
        error.add_note(f"meanwhile: {request.loss}")


def _note(request: Request, error: BaseException | None, failure: Exception) -> None:
    note_failure(error, failure, f"the release of {request.name!r} on {request.node}")
