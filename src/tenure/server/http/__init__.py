"""HTTP: the console, metrics for Prometheus, and health checks.

Read in this order: `listener` (one address), `connection` (one client, within the limits),
`service` (the answers, shared by the listeners of a server), `door` (who may use the console),
`health` (the event loop and the store), `metrics` (the list of the metrics). `options` are their
settings. All but `options` need the extra ``tenure[console]``.
"""
