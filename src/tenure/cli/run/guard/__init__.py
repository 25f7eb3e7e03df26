"""Processes between `tenure run` and its command, which end the command in time.

`processes` finds and signals processes, `cgroup` puts them into a cgroup, `guardian` is the
command's parent, and `watchdog` is the guardian's parent. `__main__` starts the two. The folder is
run by its path, as a separate package, and imports only the standard library, so that it starts
quickly.

The processes form a chain, and each is a subreaper: when one is killed, its descendants become
children of its parent in the chain, which ends them::

    tenure run -> watchdog -> guardian -> command -> ...
"""
