"""`tenure run`: a command under a lock, like `flock(1)`, across machines.

Read ``command`` (the options), ``holder`` (the lease) and ``guarded`` (the holder's view of the
command) first, then ``guard``, the processes between the two. ``waiting`` prints notices during the
wait, ``environment`` makes the command's environment, and ``jobcontrol`` and ``terminal`` connect
the command with the shell.
"""
