"""`chaos.worker` with a defect: the leases do not lapse on the holder's own clock.

A program that was stopped for longer than its window still considers its leases held, until the
store reports the loss.
"""

from __future__ import annotations

from chaos import worker
from tenure._client.session_life import Proof


def _measure(self: Proof) -> None:
    self.span = self._window + 60.0


def main() -> None:
    made = Proof.__init__

    def make(self: Proof, window: float) -> None:
        made(self, window)
        _measure(self)

    Proof.__init__ = make  # type: ignore[method-assign]  # the defect
    Proof._measure = _measure  # type: ignore[method-assign]
    Proof.interval = property(lambda self: self._window / 3)  # type: ignore[assignment, method-assign]
    Proof.renew_at = property(  # type: ignore[assignment, method-assign]
        lambda self: max(self.at + self._window / 3, self.sent + self._window / 12)
    )
    worker.main()


if __name__ == "__main__":
    main()
