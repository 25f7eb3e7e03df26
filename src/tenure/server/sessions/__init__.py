"""Sessions that the server keeps for the clients of its native protocol.

Read in this order: `session` (a session with its requests, answers and renewals, as it uses its
holder's connection), `operations` (a holder's operations), `registry` (all sessions, and their
attaching), `handoff` (takeovers by another program, and their waits). `keys` protects the sessions
of clients without a key.
"""
