"""``tenure serve``: any engine, on the network.

A server opens one store, through the engine's contract and nothing else, and offers it through
*listeners*, each one way in. It keeps no state that its store does not have, but for connections
and for what it has said to them: two servers on one store can serve one session in turn.

The parts: `app` (the server), `process` (what runs it), `settings` and `sources` (the settings and
their origins), `examination` (their faults), `addresses`, `sockets`, `tls`, `auth`, `log` and
`systemd` (what their names say); `limits` (what clients may make it hold), `context` (what all
listeners share), `session_keys` (keys of sessions whose clients show none), `reads` (turns of
costly reads), `listener` (what a listener is), `hosting` (sessions kept for remote holders),
`native` (tenure's own protocol).
"""
