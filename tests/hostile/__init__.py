"""Hostile clients against a real server, beside a client that behaves well.

`arena` has the server, the well-behaved holder and the checks; `attacker` runs an attack in a
process of its own; `attacks` is the table of attacks, and `target` is what they are made of. To add
an attack, write a function that takes a `Target` and add a line to the table.
"""
