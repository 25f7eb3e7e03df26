"""Sessions that the server keeps for the clients of its native protocol.

Read in this order: `session` (a session and its holder's connection, with its `requests`, `answers`
and `renewals`), `operations` (what a holder does with it), `registry` (all of them, and their
attaching), `handoff` and `former` (takeovers by another program, and what they wait for).
`connection` is what a session needs of a connection, `describing` hides this process from
descriptions, and `keys` protects the sessions of clients that show no key.
"""
