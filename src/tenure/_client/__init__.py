"""The primitives: client, session, lease, mutex, semaphore, election and watch.

`tenure` exports the public names. Each public object is a thin front of a core, which other
packages of tenure get from `internals`:

* `client` on `client_core`: the engine, the sessions, and the tasks that outlive a call;
* `session` on `session_core`, the adapter that the engine reports to;
* `lease` and the ticket of `semaphore` on `request`.

Read in this order: `session_states` and `request_states` have the states and their transitions as
tables; `session_life` has the proof and the end of a session, `session_core` adds its requests;
`request` is one request, `acquire` the wait for its grant, and `blocks` and `releases` its way out
of the queue. The others are primitives on these, or helpers such as the `keeper` that renews
sessions.
"""
