"""Engine that reaches another engine over a simulated bad network, with delays and outages.

`FaultyEngine` fulfils the contract, like any engine of a remote store: operations are carried out
once and in order, even if the connection breaks repeatedly. It adds the faults of a network, as
determined by its `Way`:

* Each message is delayed, and messages wait while the way is cut.
* Messages in transit are lost with the connection, and sent again over the next one.
* The answers of an hour may arrive at once.
* A grant may be reported twice.

A program that holds leases must tolerate all of these::

    way = Way(delay=lambda: random.uniform(0.001, 0.2))
    engine = FaultyEngine(MemoryEngine("store", clock), way)
    client = Client(engine, clock)
    ...
    way.lose()  # the connection breaks
    way.mend()

* `Way.cut` in both directions: the store is silent, and no session is notified.
* `Way.cut` in one direction: a half-open connection. Either requests arrive and take effect, but no
  answer returns; or no request arrives, but earlier answers return.
* `Way.lose`: a cut in both directions, with a notification of the session: it is detached.

The inner engine may use another event loop of the same thread (``store_loop``), and another clock:
proofs are converted. This engine owns it, and opens and closes it.
"""

from tenure.testing.faults.engine import FaultyEngine
from tenure.testing.faults.exchange import at_once
from tenure.testing.faults.session import FaultySession
from tenure.testing.faults.way import Way

__all__ = ["FaultyEngine", "FaultySession", "Way", "at_once"]
