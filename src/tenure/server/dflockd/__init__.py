"""dflockd's line protocol, so that its clients use tenure's locks unchanged.

From below: `tenure.wire.lines` (bytes), `claims`, `holder` and `locks` (which keys there are, who
has what of them: each rule of time and number), `commands` (what a request does, and what is
replied), `connection` (bytes in order, what a client may not do), `listener` (all of them, and
the clock), and `housekeeping` (what is done now and then).
"""
