"""Parts that engines share.

* ``url`` reads a URL by a table of parameters.
* ``backoff`` has the pauses between attempts.
* ``extras`` names the extra that a missing package belongs to.
* ``heartbeat`` renews sessions in a thread while the event loop is stuck.
* ``reconnect`` connects to one of several hosts, again and again, in one task.
* ``commands`` has what engines share that send commands to a server with the rules.
* ``session`` has the life cycle of an attached session: its takeover and its end.
* ``watchers`` keeps an engine's local watches by name and by session.
"""
