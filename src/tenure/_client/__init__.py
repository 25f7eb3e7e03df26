"""The primitives: client, session, lease, mutex, semaphore, election and watch.

`tenure` exports the public names. Each public object is a thin wrapper around a core; other
packages of tenure get the cores from `internals`:

* `client` wraps `client_core`: the engine, the sessions, and the tasks that outlive a call;
* `session` wraps `session_core`, the adapter that the engine reports to;
* `lease` and `ticket` wrap `request`, which uses its session as a `request_session`.

Read in this order: `session_states` and `request_states` define the states and their transitions as
tables; `session_life` covers the proof and the end of a session, and `session_core` adds its
requests; `request` is one request, `acquire` waits for its grant, and `blocks` and `releases` take
it out of the queue. The other modules are primitives built on these, or helpers such as the
`keeper`, which renews sessions.
"""
