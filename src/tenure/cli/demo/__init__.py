"""`tenure demo`: real processes on one SQLite file, what they do recorded and checked.

``command`` is what a person types, ``scenes`` what happens, ``worker`` a process that takes part,
``crew`` those processes as the demo sees them, ``history`` what was recorded and what it proves,
``picture`` how it looks.
"""
