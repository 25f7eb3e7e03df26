"""dflockd's line protocol, so that its clients use tenure's locks without changes.

From below, each using only those before it: `tenure.wire.lines` (bytes), `claims` (keys, claims and
their sessions), `locks` (their tables, with the rules of time and number), `remote` (tokens and
orphans of other listeners), `stream` (bytes in order), `connection` (a client's waits, checks and
end), `commands` (requests and their replies) and `listener` (all connections, and the periodic
work). `options` and `flags` are their settings.
"""
