"""End a test run that hangs, and name the test.

pytest-timeout fails a test that takes too long, from within its process. It cannot end a run in
which that failure is swallowed, or that hangs in C code, between tests or after them. And a worker
of pytest-xdist that has ended leaves its forked children, which keep open what the run waits for.

So each process of pytest has a guard: a process of its own, which is told what begins and what
time it has. When that time is over, the guard names what hangs, has the process write the stacks
of all threads, and kills it with all its descendants. pytest-xdist then reports the test as the
one during which its worker crashed, and goes on with the others.

`plugin` is the part in pytest, `guard` is the program.
"""
