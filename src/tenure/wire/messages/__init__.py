"""Messages of the native protocol: sender, order and meaning of each.

A message is an array: its number, then its fields. Fields are added at the end, with a default; an
end that does not know them ignores them. A message that the other end may not know is sent only if
both ends have its feature. docs/reference/native-protocol.md is the complete specification.

Rules:

* **Greeting.** The client sends `Hello`, the server answers `Welcome`, and other messages follow.
  Any other first message, and any undecodable message, ends the connection with a `Bye`.
* **Channels.** A connection carries many sessions, each on a *channel*: a number that the client
  chooses, and uses for no other session. It may attach the same session to it again, on another
  connection or after a failure on this one. Channel 0 belongs to no session.
* **Requests** (`rid` is their first field) are numbered by the client from 1, in rising order, over
  all channels and connections of the program (its `Hello.program`). Each is answered once, with its
  rid: `Attached`, `Placed`, `Done`, `Failed`, or the requested description. The requests of one
  channel take effect in the order in which they were sent; their answers come in any order.
* **Operations** are the requests of a session: those with a `rid` and a `channel`, except `Attach`.
  When a connection is lost, the client reattaches over another one, and resends all unanswered
  operations, in order and with the same rids. The server keeps each answer until the client
  acknowledges it, so that a repeated operation is answered but not carried out twice. Answers of
  operations that only read are not kept; these operations are repeated.
* **Acknowledging.** `acknowledged` is a rid: every operation of the session up to it has been
  answered, or was never sent. The client sends at most `Welcome.kept_answers` operations of a
  session beyond it, which bounds the kept answers.
* **Pushes** (`Granted`, `Removed`, `Changed`, `Contact`, `Ended`) have a channel and are not
  answered. The answer to an `Enqueue` precedes every push for that request.
* **Proof** does not use requests: `Renew` is answered by `Proven` or `Unproven` with its number,
  and a lost one is not sent again.
* **Heartbeat.** An end that receives nothing for three times `Welcome.heartbeat` considers the
  connection dead. So a client that has sent nothing for one heartbeat sends `Ping`.
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
    """Return a decoder of server messages; it raises like that of `client_message`."""
    return Decoder(ServerMessage)
