"""Protocols between clients and servers, without I/O, clock or asyncio.

The native protocol, of tenure's own clients and its server: `frames` cuts a stream of bytes into
messages, `messages` defines the messages and their order, `values` the descriptions in them, and
`errors` the encoding of errors.

dflockd's protocol is in `lines`. `places` parses the addresses in URLs. Both need nothing outside
the standard library.
"""
