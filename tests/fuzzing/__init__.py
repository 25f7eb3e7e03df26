"""Fuzzing of everything that reads what others wrote: bytes of the network, files, URLs, tokens.

``make fuzz`` (``python -m tests.fuzzing``) changes well-formed inputs at random for a minute. It
checks of each that only the documented errors are raised, in bounded time and memory. It prints its
seed, and of a finding the command that repeats it. `test_fuzzing` runs a short part with fixed
seeds.

Read in this order: `mutations` (how inputs are changed), `checks` (what is a finding), `parsers`,
`settings` and `stores` (what is fuzzed within this process), `servers` (a server as a process,
fuzzed through its sockets), `__main__`.
"""
