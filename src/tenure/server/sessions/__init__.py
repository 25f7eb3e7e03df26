"""Sessions that the server keeps for the clients of its native protocol.

Read in this order: `session` (a session with its requests and answers, and its holder's connection)
and its `renewals`, `operations` (a holder's operations), `registry` (all sessions, and their
attaching), `handoff` (takeovers by another program, and their waits). `connection` is a session's
interface to a connection, and `keys` protects the sessions of clients without a key.
"""
