"""Parts that engines share.

* ``url`` reads a URL by a table of parameters, and names the extra of a missing package.
* ``doctor`` has findings of `tenure doctor` that are common to networked stores.
* ``heartbeat`` renews sessions in a thread while the event loop is stuck.
* ``quarantine`` is the time for which a store grants nothing after a loss of data.
* ``operations`` has the order of a program's operations on each name.
* ``reconnect`` keeps a connection to one of several hosts, in one task, with growing pauses.
* ``commands`` is shared by engines whose server implements the queue rules.
* ``session`` has the life cycle of an attached session: its takeover and its end.
* ``watchers`` keeps an engine's local watches by name and by session.
"""
