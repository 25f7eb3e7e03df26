"""``tenure serve``: any engine, on the network.

A server opens one store, through the engine's contract alone, and serves it through *listeners*.
All its state is in the store, except its connections and the answers sent to them, so two servers
on one store can serve the same session one after the other.

Read in this order: `app` (the server), `process` (runs it), `settings` and `sources` (the settings
and their origins), `loading` (their files and checks), `addresses`, `tls`, `log` and `audit`;
`limits`, `semaphores` (their count), `budget` and `reads` (fair use of the event loop), `context`
(shared by all listeners), `meter` (counts for the metrics), `admission` and `listener`
(connections). Each protocol has a folder: `native`, `ydb`, `dflockd` and `http`. `sessions` has the
sessions of the native protocol, and `auth` has identities, permissions and quotas.
"""
