"""dflockd's line protocol, so that its clients use tenure's locks unchanged.

From below, each using only those before it: `tenure.wire.lines` (bytes), `claims` (keys, claims and
their sessions), `keys` and `locks` (their tables: each rule of time and number), `stats`,
`housekeeping` and `orphans` (what is done now and then), `remote` (tokens of other listeners),
`stream` (bytes in order), `connection` (what a client waits for, may not do, and how it ends),
`commands` (requests and their replies) and `listener` (all connections, and the clock).
`options` and `flags` are their settings.
"""
