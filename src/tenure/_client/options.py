"""Options of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tenure._client.loss import OnLoss, check_policy
from tenure.durations import Duration, seconds

L_co = TypeVar("L_co", covariant=True)


class RequestOptions(Generic[L_co]):
    """Options of a request: the tokens of a semaphore, and the type of the lease.

    Attributes:
        kind: the kind of primitive in messages, such as "mutex".
        handle: makes the program's lease from the granted `Request`.
    """

    __slots__ = (
        "count",
        "data",
        "ephemeral",
        "handle",
        "kind",
        "name",
        "on_loss",
        "stop_time",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        count: int,
        data: bytes = b"",
        *,
        handle: Callable[..., L_co],
        ephemeral: bool,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> None:
        if on_loss is not None:
            check_policy(on_loss)
        self.kind = kind
        self.name = name
        self.count = count
        self.data = data
        self.handle = handle
        self.ephemeral = ephemeral
        self.on_loss = on_loss
        usual = type(stop_time) is float and stop_time == 0.0
        self.stop_time = 0.0 if usual else seconds(stop_time, "a stop time")

    def __str__(self) -> str:
        return f"the request for {self.kind} {self.name!r}"
