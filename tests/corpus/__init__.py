"""What hurt the users of other locks, row by row, in one place.

Each pain (`pains`) has a check that tenure passes on every engine for which it makes sense, and a
defect that, planted into tenure, makes that very check fail: so the check is known to see it. The
checks are in the other modules, by theme; `test_corpus` runs them, and `python -m tests.corpus`
writes the table in docs/evidence/pains.md.

An engine that comes later joins by a line in `subjects`, and by its own plants in those rows
whose defect lies within the engine.
"""
