"""Parts that engines share.

* ``url`` reads a URL by a table of parameters.
* ``backoff`` has the pauses between attempts.
* ``extras`` names the extra of a missing package.
* ``heartbeat`` renews sessions in a thread while the event loop is stuck.
* ``reconnect`` keeps a connection to one of several hosts, in one task.
* ``commands`` is shared by engines whose server implements the queue rules.
* ``session`` has the life cycle of an attached session: its takeover and its end.
* ``watchers`` keeps an engine's local watches by name and by session.
"""
