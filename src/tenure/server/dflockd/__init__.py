"""dflockd's line protocol, so that its clients use tenure's locks unchanged.

From below: `tenure.wire.lines` (bytes), `claims`, `holder` and `locks` (keys and their claims: each
rule of time and number), `commands` (requests and their replies), `stream` (bytes in order),
`connection` (what a client waits for, may not do, and how it ends), `listener` (all connections,
and the clock), and `housekeeping` (what is done now and then).
`options` and `flags` are their settings.
"""
