"""dflockd's line protocol, both sides: bytes to requests and replies, and back.

A request is three lines (command, key, argument), a reply is one, and replies come in the order of
the requests. A line has at most 256 bytes before its end, the token of an `auth` 64 KiB; behind
one that is longer nothing can be read. Rules:

* What a client gets wrong in a request is no exception on the server's side: it is the reply
  `error`. What a client would send wrong is `InvalidArgument`; what a server replies wrong is
  `BadReply`.
* A reader keeps no more than the beginning of one request or reply.

A server needs `requests`, to read, and the words in `replies`; a client needs `requesting`, and to
read, `replies`.
"""
