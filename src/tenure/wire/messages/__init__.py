"""The messages of the native protocol: who sends each, when, and what it means.

A message is an array: its number, then its fields. Fields are added at the end, with a default;
an end that does not know them passes over them, and a message that an end would not know is sent
only when both have named the feature that it belongs to.

Rules of the conversation:

* **Greeting.** The client says `Hello`, the server `Welcome`, and only then anything else is
  said. Whatever else comes first, and what cannot be decoded, ends the connection, with a `Bye`.
* **Channels.** Over one connection a client has many sessions, each on a *channel*: a number
  that the client chooses, and gives to no other session. It may attach the same session to it
  again, on another connection or when it was refused on this one. Channel 0 is no session.
* **Requests** (`rid` is their first field) are numbered by the client, from 1, rising, over all
  channels and for the whole life of the program (its `Hello.program`), so over all connections.
  Each is answered once, with its rid: `Attached`, `Placed`, `Done`, `Failed`, or what it asked
  for. The requests of one channel take effect in the order in which they were sent; their
  answers come in any order.
* **Operations** are the requests of a session: those with a `rid` and a `channel`, but for
  `Attach`. When a connection is lost the client attaches again over another one, and sends again,
  in order and with the same rids, every operation that was not answered. The server keeps each
  answer until the client acknowledges it, so that what was done is answered again and not done
  twice; but what only reads it does again, and keeps nothing.
* **Acknowledging.** `acknowledged` is a rid: every operation of the session up to it has been
  answered, or was never sent. The client sees to it that no more than `Welcome.kept_answers`
  operations of a session have been sent since, so that what the server keeps is bounded.
* **Pushes** (`Granted`, `Removed`, `Changed`, `Contact`, `Ended`) have a channel and are not
  answered. The answer to an `Enqueue` precedes every push for that request.
* **Proof** goes beside the requests: `Renew` is answered by `Proven` or `Unproven` with its
  number, and a lost one is not sent again.
* **Heartbeat.** Who hears nothing for three times `Welcome.heartbeat` takes the connection for
  dead. So a client that has sent nothing for one heartbeat sends `Ping`.
"""

from __future__ import annotations

from msgspec.msgpack import Decoder

from tenure.wire.messages import client, server, terms
from tenure.wire.messages.client import *  # noqa: F403  (each part lists its names)
from tenure.wire.messages.client import ClientMessage
from tenure.wire.messages.server import *  # noqa: F403
from tenure.wire.messages.server import ServerMessage
from tenure.wire.messages.terms import *  # noqa: F403

__all__ = ["client_message", "server_message"]
__all__ += client.__all__
__all__ += server.__all__
__all__ += terms.__all__


def client_message() -> Decoder[ClientMessage]:
    """Return a decoder of client messages; it raises `msgspec.DecodeError` or `RecursionError`."""
    return Decoder(ClientMessage)


def server_message() -> Decoder[ServerMessage]:
    """Return a decoder of server messages; it raises as that of `client_message` does."""
    return Decoder(ServerMessage)
