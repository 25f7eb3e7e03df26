"""Chaos on the real thing: real processes, a nemesis, and the checker of histories.

``python -m chaos run --engine sqlite --seconds 60`` starts processes that coordinate through a
store, breaks what can be broken, and has `tenure.testing.history` say whether every promise was
kept. How the parts lie, from the bottom up:

* `chaos.work` names what the processes compete for; `chaos.worker` is such a process.
* `chaos.crew` starts, stops, kills and restarts the processes.
* `chaos.adapter` is what an engine has to say for itself; `chaos.sqlite` says it.
* `chaos.faults` are the faults that need no engine's help; `chaos.nemesis` inflicts all of them.
* `chaos.runner` runs it; `chaos.figures` and `chaos.report` say how it went.
"""
