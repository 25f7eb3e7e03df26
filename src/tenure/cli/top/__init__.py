"""`tenure top`: holders and waiters, live.

``snapshot`` reads the store, ``view`` is what the person wants to see of it and what a key changes
about that, ``draw`` makes lines of both; these know no terminal. ``screen`` is the terminal, and
``command`` puts them together.
"""
