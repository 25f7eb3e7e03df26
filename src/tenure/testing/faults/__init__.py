"""An engine that reaches another one over a bad network: late, in pieces, or not at all.

`FaultyEngine` fulfils the contract, as any engine of a remote store must: what it was told to do
is done once and in order, however often the connection breaks meanwhile. What it adds is what a
network adds, as its `Way` has it: each message takes a while, messages wait while the way is cut,
those on their way are lost with the connection and sent again over the next, the answers of an
hour may arrive in one moment, a grant may be told twice. A program that holds leases has to live
with all of that::

    way = Way(delay=lambda: random.uniform(0.001, 0.2))
    engine = FaultyEngine(MemoryEngine("store", clock), way)
    client = Client(engine, clock)
    ...
    way.lose()  # the connection breaks
    way.mend()

* `Way.cut` both ways: the store is silent, and nobody is told.
* `Way.cut` one way: half-open. What is sent arrives and takes effect, and no answer comes; or it
  is the answers of before that still come.
* `Way.lose`: the same, and the session is told that it is detached.

The inner engine may belong to another event loop of the same thread (``store_loop``), and to
another clock: proofs are translated. It is this engine's own, opened and closed with it.
"""

from tenure.testing.faults.answers import at_once
from tenure.testing.faults.engine import FaultyEngine
from tenure.testing.faults.session import FaultySession
from tenure.testing.faults.way import Way

__all__ = ["FaultyEngine", "FaultySession", "Way", "at_once"]
