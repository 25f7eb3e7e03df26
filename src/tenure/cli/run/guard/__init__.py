"""The processes between `tenure run` and its command, which end the command in time.

`processes` finds and signals processes, `cgroup` puts them into a cgroup, `guardian` is the
command's parent, and `watchdog` is the guardian's. `__main__` starts the two. The folder is run by
its path, as a package of its own, and imports the standard library only, so that it starts quickly.

The tree of processes is a chain, and every link is a subreaper: what one of them leaves behind when
it is killed becomes a child of the next one up, which ends it::

    tenure run -> watchdog -> guardian -> command -> ...
"""
