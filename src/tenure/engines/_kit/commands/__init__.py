"""Shared parts of engines that send commands to a server, over a connection that is replaced.

Such a server implements the queue rules itself, in scripts or in functions of a database. Each
engine encodes the commands and makes the connections.

Modules, in reading order: `replies` decodes and encodes. `pipeline` has the operations, which are
sent in batches and kept while there is no connection; for a database it decides which statements
are under way together. `session` has a session's token, end and requests. `engine` opens and
closes, attaches and takes over, and has the operations on nodes.
"""
