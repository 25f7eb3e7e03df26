"""Engine that reaches another engine over a simulated bad network, with delays and outages.

`FaultyEngine` fulfils the contract, as any engine of a remote store must: operations are carried
out once and in order, however often the connection breaks meanwhile. It adds the faults of a
network, as its `Way` determines:

* Each message is delayed, and messages wait while the way is cut.
* Messages in transit are lost with the connection, and sent again over the next one.
* The answers of an hour may arrive at one moment.
* A grant may be reported twice.

A program that holds leases has to tolerate all of that::

    way = Way(delay=lambda: random.uniform(0.001, 0.2))
    engine = FaultyEngine(MemoryEngine("store", clock), way)
    client = Client(engine, clock)
    ...
    way.lose()  # the connection breaks
    way.mend()

* `Way.cut` in both directions: the store is silent, and no session is notified.
* `Way.cut` in one direction: a half-open connection. Either requests arrive and take effect, but
  no answer returns. Or no request arrives, while earlier answers still return.
* `Way.lose`: a cut in both directions, of which the session is notified: it is detached.

The inner engine may belong to another event loop of the same thread (``store_loop``), and to
another clock: proofs are translated. This engine owns it, and opens and closes it.
"""

from tenure.testing.faults.engine import FaultyEngine
from tenure.testing.faults.exchange import at_once
from tenure.testing.faults.session import FaultySession
from tenure.testing.faults.way import Way

__all__ = ["FaultyEngine", "FaultySession", "Way", "at_once"]
