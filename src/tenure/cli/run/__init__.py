"""`tenure run`: a command under a lock, as `flock(1)` does it, across machines.

``command`` is what a person types, ``holder`` the one who holds the lease, ``guarded`` the
holder's view of the command, ``guardian`` the process between the two, ``terminal`` what job
control needs.
"""
