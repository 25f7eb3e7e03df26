"""Mutation testing: small changes to the code, each of which a test should notice.

`python -m tests.mutation` (`make mutate`) has mutmut change one thing at a time in a group of
modules (`groups.toml`) and run the tests of that group. What came of it is kept in
`results.toml`, why a survivor is left alone in `survivors.toml`, and
docs/evidence/mutation.md is written from the two.
"""
