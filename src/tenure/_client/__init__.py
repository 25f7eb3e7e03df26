"""The primitives: client, session, lease, mutex, semaphore, election and watch.

The public names are exported by `tenure`. A client owns its sessions, a session owns its requests,
and each request becomes a lease once it is granted. Read `session` and `requested` first: each
module opens with the states that it owns. `ending` is the end of a session, `request` the wait for
a grant, `withdrawal` the way out of a queue. The other modules stand on these.
"""
