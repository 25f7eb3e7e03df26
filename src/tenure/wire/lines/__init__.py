"""dflockd's line protocol, for both ends: encoding and decoding of requests and replies.

A request is three lines (command, key, argument), a reply is one, and replies come in the order of
the requests. A line has at most 256 bytes before its end, the token of an `auth` 64 KiB; nothing
can be read after a longer line. Rules:

* An invalid request raises nothing on the server: the reply is `error`. Invalid arguments on the
  client raise `InvalidArgument`; an invalid reply raises `BadReply`.
* A reader buffers at most one incomplete request or reply.

A server uses `requests`, and the words in `replies`; a client uses `requesting` and `replies`.
"""
