"""The native protocol: what tenure's own clients and its server say to each other.

It has no I/O, no clock and no asyncio: `frames` cuts a stream of bytes into messages, `messages`
says what each message means and when it is sent, `values` are the descriptions that they carry,
and `errors` carries an error from one end to the other.
"""
