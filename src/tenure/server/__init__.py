"""``tenure serve``: any engine, on the network.

A server opens one store, through the engine's contract and nothing else, and offers it through
*listeners*, each one way in. It keeps no state that its store does not have, but for connections
and for what it has said to them: two servers on one store can serve one session in turn.

Read in this order: `app` (the server), `process` (what runs it), `settings` and `sources` (the
settings and their origins), `examination` (their faults), `loading` and `reloading` (their files),
`addresses`, `sockets`, `tls`, `tls_input`, `log`, `log_writer`, `audit` and `systemd`; `limits` and
`semaphores` (what clients may make it hold), `budget` and `reads` (turns on the event loop),
`context` (what all listeners share), `accept`, `admission`, `foreign` and `listener` (how
connections come in, and which). Then a folder for each protocol, `native`, `ydb` and
`dflockd`, with `sessions` (those of the native protocol) and `auth` (identities, permissions and
quotas).
"""
