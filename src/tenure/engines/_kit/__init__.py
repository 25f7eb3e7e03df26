"""Parts that engines share.

* ``url`` reads a URL by a table of parameters.
* ``backoff`` has the pauses between attempts.
* ``watchers`` keeps an engine's local watches by name and by session.
"""
