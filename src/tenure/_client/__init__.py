"""The primitives: client, session, lease, mutex, semaphore, election and watch.

`tenure` exports the public names. Each public object is a thin wrapper around a core; other
packages of tenure get the cores from `internals`:

* `client` wraps `client_core`: the engine, the sessions, and the tasks that outlive a call;
* `session` wraps `session_core`, the adapter that the engine reports to;
* `lease` and `ticket` wrap `request`.

Read in this order: `session_life` covers the states, the proof and the end of a session, and
`session_core` adds its requests; `request` is one request with its states, `acquire` waits for its
grant, and `lease` and `tasks` take it out of the queue. `client_core` renews the sessions. The
other modules are primitives built on these, or helpers.
"""
