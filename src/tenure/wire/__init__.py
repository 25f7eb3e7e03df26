"""Protocols between clients and servers, without I/O, clock or asyncio.

The native protocol, of tenure's own clients and its server: `frames` cuts a stream of bytes into
messages, `messages` says what each message means and when it is sent, `values` are the
descriptions that they carry, and `errors` carries an error from one end to the other.

dflockd's protocol is in `lines`. `places` parses the addresses in URLs. Both need nothing outside
the standard library.
"""
