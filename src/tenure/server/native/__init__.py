"""The native protocol, used by tenure's own clients.

Read in this order: `stream` (frames and their limits), `connection` (a client's messages, on its
channels, and the operations without a session), `listener`. The sessions are in
`tenure.server.sessions`, and the messages in `tenure.wire`.
"""

from tenure.server.native.listener import NativeListener

__all__ = ["NativeListener"]
