"""Shared parts of engines that send commands to a server, over a connection that is replaced.

Such a server keeps the rules of queues by itself, in scripts or in functions of a database. Each
engine encodes the commands for it and makes the connections.

Modules, in the order to read them in: `replies` and `values` have what is sent and received.
`session` has the requests of a session, upon `attachment`, its token and end, and `operations`
are what it sends in batches. `attaching` attaches and takes over. `engine` opens and closes;
its base is `administration`, the operations on nodes.
"""
