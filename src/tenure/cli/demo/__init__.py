"""`tenure demo`: real processes on one SQLite file, whose actions are recorded and checked.

``command`` is the command, ``scenes`` the scenarios, ``worker`` a participating process, ``crew``
controls these processes, ``history`` records and checks, and ``picture`` draws.
"""
