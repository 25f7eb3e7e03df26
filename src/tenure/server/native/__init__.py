"""The native protocol, which tenure's own clients speak.

Read in this order: `stream` (frames that come and go, with their limits), `connection` (what a
client sends, on its channels), `commands` and `reads` (operations on the store as a whole),
`listener`. The sessions are in `tenure.server.sessions`, and the messages in `tenure.wire`.
"""

from tenure.server.native.listener import NativeListener

__all__ = ["NativeListener"]
