"""Sessions that the server keeps for the clients of its native protocol.

Read in this order: `session` (a session and its holder's connection, with its `requests`, `answers`
and `renewals`), `operations` (a holder's operations), `registry` (all sessions, and their
attaching), `handoff` and `former` (takeovers by another program, and their waits). `connection` is
a session's interface to a connection, `describing` hides this process in descriptions, and `keys`
protects the sessions of clients without a key.
"""
