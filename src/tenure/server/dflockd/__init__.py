"""dflockd's line protocol, so that its clients use tenure's locks unchanged.

From below: `tenure.wire.lines` (bytes), `claims`, `holder` and `locks` (which keys there are, who
has what of them: each rule of time and number), `commands` (what a request does, and what is
replied), `stream` (bytes in order), `connection` (what a client waits for, may not do, and how it
ends), `listener` (all of them, and the clock), and `housekeeping` (what is done now and then).
`options` and `flags` are their settings.
"""
