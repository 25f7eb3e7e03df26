"""`tenure top`: holders and waiters, live.

``snapshot`` reads the store, ``view`` is the selection to show, changed by keys, and ``draw`` makes
lines of both, all without a terminal. ``screen`` is the terminal, and ``command`` combines them.
"""
