"""Shared parts of engines that send commands to a server, over a connection that is replaced.

Such a server implements the queue rules itself, in scripts or in functions of a database. Each
engine encodes the commands and makes the connections.

Modules, in reading order: `replies` and `values` decode and encode. `session` has the requests of a
session, based on `attachment` (its token and end), and `operations` are sent in batches. `handoff`
passes mutexes on between requests of a session, for engines whose store reports neighbours, and
`polling` polls for waiters where the store delivers no events. For a database, `statements` has
batches of operations, and `pipeline` decides which statements are under way together. `unsent`
keeps operations, and such statements, while there is no connection. `engine` opens and closes; its
bases are `attaching`, which attaches and takes over, and `administration`, the operations on nodes.
"""
