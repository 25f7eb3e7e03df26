"""Loss of a lease, its policies and its errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal, Protocol

from tenure.errors import InvalidArgument, LeaseLost

OnLoss = Literal["cancel", "exit"] | Callable[[LeaseLost], object]
"""Policy for the loss of a lease. ``"cancel"`` cancels the task that entered its block; ``"exit"``
ends the process at once; a callable is called, perhaps from another thread, and the task is
cancelled too. A loss that only the release shows is just raised: the work to stop has ended."""

LOSS_EXIT_STATUS = 79
"""Exit status of a process that ``on_loss="exit"`` ended."""


class LosableRequest(Protocol):
    """A request, as named in the errors of its loss."""

    name: str
    order_id: int | None

    @property
    def node(self) -> str: ...


_log = logging.getLogger("tenure")


def check_policy(on_loss: OnLoss | None) -> None:
    """Raise `InvalidArgument` for an invalid policy; ``None`` stands for the session's policy."""
    if on_loss is not None and on_loss not in ("cancel", "exit") and not callable(on_loss):
        raise InvalidArgument(
            f"on_loss is 'cancel', 'exit' or a callable that takes the LeaseLost, not {on_loss!r}"
        )


def carry_out(policy: OnLoss, loss: LeaseLost) -> None:
    """Carry out the policy, beyond cancelling the task. From any thread."""
    if policy == "exit":
        try:
            os.write(2, f"tenure: {loss}; this process ends\n".encode(errors="replace"))
        finally:
            os._exit(LOSS_EXIT_STATUS)
    if callable(policy):
        try:
            policy(loss)
        except BaseException:
            # In the keeper's thread no caller could catch it, and other leases need the thread.
            _log.exception("the on_loss callback failed: node=%s name=%r", loss.node, loss.name)


def lost_error(request: LosableRequest, reason: str, cause: BaseException | None) -> LeaseLost:
    """Return the loss of a lease, with its reason and, if there is one, the cause."""
    error = LeaseLost(
        f"the lease of {request.name!r} on {request.node} is lost: {reason}; "
        "stop what it protects: another program may hold it already",
        node=request.node,
        name=request.name,
        fencing_token=request.order_id,
    )
    error.__cause__ = cause
    return error


def late_release_error(request: LosableRequest, cause: BaseException | None) -> LeaseLost:
    """Return the loss of a lease that only its release has revealed."""
    why = "evicted, deleted or lapsed" if cause is None else str(cause)
    error = LeaseLost(
        f"the lease of {request.name!r} on {request.node} was lost before its release: the request "
        f"had left its queue ({why}). Check what it protects: the next holder may have changed it "
        "meanwhile",
        node=request.node,
        name=request.name,
        fencing_token=request.order_id,
    )
    error.__cause__ = cause
    return error
