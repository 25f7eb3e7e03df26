"""Scripts that Redis runs: one for each file of this folder.

====================  ===========================================================================
script                purpose
====================  ===========================================================================
``hello.lua``         first contact of a connection: the epoch, and the quarantine of a namespace
``attach.lua``        attach a new session
``reattach.lua``      attach a session again after an interruption, under a new token
``takeover.lua``      take over the session of another program
``remaining.lua``     renew a session during its takeover; how long its leases may be held elsewhere
``begin.lua``         complete a takeover, and read the requests of the session
``acknowledge.lua``   report that an attachment that was superseded considers nothing held
``operate.lua``       add and withdraw requests, as many as the session sends together
``change.lua``        change semaphores and requests, each change once
``renew.lua``         extend a session's expiry
``look.lua``          read the state of some requests, in case a push was lost
``position.lua``      read the position of one request in its queue, after what is due has expired
``describe.lua``      describe semaphores with their requests
``names.lua``         list some names of semaphores
``page.lua``          describe semaphores, as many as fit on a page
``queue.lua``         describe a part of a queue
``watch.lua``         have changes published
``tick.lua``          expire what is due, and grant what fits
``leave.lua``         end or detach a session
``rate.lua``          carry out an operation on a rate
``admin.lua``         nodes, sessions and evictions, for administrators
====================  ===========================================================================

=====================  ==========================================================================
key                    contents
=====================  ==========================================================================
``meta``               hash: the state of the namespace (``parts/namespace.lua``)
``nodes``, ``born``    hashes by path: the nodes' configurations; since when they exist
``S:NODE``             set: the ids of the node's sessions
``s:ID``               hash: a session, with its requests (``parts/queues.lua``)
``x``                  sorted set: the sessions that have requests, by their expiry
``m:NODE:NAME``        hash, or string in the short form: a semaphore with its requests
``w:NODE:NAME``        sorted set: the waiters of a semaphore, by order id
``M:NODE``             set: the names of the node's lasting semaphores
``d``                  sorted set: the waiters with a timeout, by the end of that
``a:TOKEN``            string: the answer to an operation that may be sent again, for a minute
``r:NODE:NAME``        list: a rate (``rate.lua``)
``c:EPOCH:NODE:NAME``  channel: changes of a semaphore, for watches
``p:RANDOM``           channel: pushes to the sessions of one client
=====================  ==========================================================================

Each begins with the prefix of the namespace. The first lines of a file have its arguments
(``ARGV``) and its answers.

The files in ``parts/`` are what scripts have in common. A script or a part names the parts that it
needs, in lines such as::

    --#include parts/queues.lua

The text of the part takes the place of the line, with the parts that it includes itself. A part is
included once in a script, at its first mention. What it declares is local to the block of that
line.

======================  =========================================================================
part                    contents
======================  =========================================================================
``namespace.lua``       the beginning: key prefix, clock, and the state of the namespace
``queues.lua``          semaphores in their two forms, and the requests in their queues
``expiry.lua``          the end of sessions and of requests that have timed out
``mending.lua``         queues of which records were deleted
``sessions.lua``        recovery windows, and the clock; every script but ``operate`` includes it
``descriptions.lua``    descriptions of semaphores
``operations.lua``      operations on any queue, for ``operate``
======================  =========================================================================

In Lua, creating a function costs about as much as looking up a key. So ``operate`` includes the
functions for rare cases in a function that is called when one of those occurs.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from importlib.resources.abc import Traversable

_INCLUDE = re.compile(r"^ *--#include (\S+)\n", re.MULTILINE)


class Script:
    """Text of a script, and the digest by which Redis identifies it."""

    __slots__ = ("digest", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def assemble(folder: Traversable, name: str) -> str:
    """Return the text of a file, with the parts that it includes.

    Raises:
        FileNotFoundError: there is no such file or part.
    """
    included: set[str] = set()

    def read(name: str) -> str:
        return _INCLUDE.sub(part, (folder / name).read_text("utf-8"))

    def part(line: re.Match[str]) -> str:
        if line[1] in included:
            return ""
        included.add(line[1])
        return read(line[1])

    return read(name)


def _load() -> dict[str, Script]:
    folder = resources.files(__name__)
    names = [each.name for each in folder.iterdir() if each.name.endswith(".lua")]
    return {
        stem: Script(stem, assemble(folder, name))
        for stem, name in sorted((each.removesuffix(".lua"), each) for each in names)
    }


SCRIPTS = _load()
