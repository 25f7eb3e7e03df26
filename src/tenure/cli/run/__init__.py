"""`tenure run`: a command under a lock, as `flock(1)` does it, across machines.

Read ``command`` (the options), ``holder`` (the lease) and ``guarded`` (the holder's view of the
command) first, then ``guard``, the processes between the two. ``waiting`` prints notices about the
wait, ``environment`` makes the command's environment, ``jobcontrol`` and ``terminal`` connect the
command with the shell.
"""
