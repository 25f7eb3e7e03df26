"""The reaper: a process beside a program that ends its sessions as soon as the program is dead.

A networked store learns of the death of a program only by its silence, for the recovery window. The
reaper learns of it from the kernel, and then ends the program's sessions in the store, so that the
next holder follows at once. One reaper serves all clients of a program.

States of the reaper::

    waiting --death--> ending --all ended, or window passed--> left
       |----no session for a minute--------------------------> left
       +----silence (its socket closed, the program lives)---> forsaken --window passed--> left
                                                                   +----death--> ending

Rules:

* **Only the death counts.** It is reported by a pidfd, which the program opens for itself and
  passes on (Linux), or by kqueue (macOS). A program that is stopped, being debugged or stuck is
  alive. The end of the socket is no death: descriptors are inherited and closed by others.
* **Exactly the program's sessions.** The program registers each session of liveness ``"process"``
  with its credential, which no other attachment has. A session that is closed or detached is
  withdrawn. A resumable session is never registered: it survives the program.
* **Nothing depends on it.** If it cannot be started or is killed, the store ends the sessions when
  their windows have passed.
* **Nothing of the program is shared** but the pidfd and the socket. The reaper is no child of the
  program (a shell starts it and ends), has its own session and no inherited descriptor, and ignores
  signals except SIGKILL. SIGTERM shortens its attempts.
* **It outlives the clients** of a program that opens and closes many, and leaves after a minute
  without sessions. The next session starts another one.
* The credentials and the URL pass through the socket, never through arguments or the environment.
* A forked child has no part in it: its first session starts a reaper of its own. After an ``exec``
  the process lives on, so its sessions expire with their windows, and then the reaper leaves.
* Where a session can be ended with bytes that need no answer, these are sent first: the next holder
  follows before the engine is imported, which then makes sure of it.
* While it waits, it is an interpreter with the standard library alone. After the death it imports
  the engine from the program's ``sys.path``.

`program` is the program's part. `waiter` is the process, which is run by its path and imports
nothing of tenure while it waits. `ending` ends the sessions.
"""
