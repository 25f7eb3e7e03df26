"""What wraps an engine passes on each optional member, or is known to leave it out."""

from __future__ import annotations

import pytest

from tenure.engines.contract import EngineDefaults, SessionDefaults
from tenure.server.auth.guarded import GuardedEngine, GuardedSession
from tenure.testing.faults import FaultyEngine, FaultySession
from tests.primitives.slow import SlowEngine, SlowSession

OF_ITS_PROGRAM = {"token_of", "credential", "last_words", "refusal"}
"""What the program itself asks its session for; a wrapper's default says that there is none."""

OF_THE_STORE = {"guarantees", "liveness_fd", "diagnose", "end_orphan"}
"""What is asked of the engine of a store, and not of a wrapper of it."""

LEFT_OUT: dict[type, set[str]] = {
    GuardedSession: OF_ITS_PROGRAM | {"position"},
    FaultySession: OF_ITS_PROGRAM | {"position"},
    SlowSession: OF_ITS_PROGRAM | {"position"},
    GuardedEngine: OF_THE_STORE | {"guard"},
    FaultyEngine: OF_THE_STORE,
    SlowEngine: OF_THE_STORE | {"guard", "pages"},
}


@pytest.mark.parametrize("wrapper", LEFT_OUT, ids=lambda wrapper: wrapper.__name__)
def test_a_wrapper_passes_on_what_it_does_not_leave_out(wrapper: type) -> None:
    [defaults] = {EngineDefaults, SessionDefaults} & {*wrapper.__mro__}
    members = {name for name in vars(defaults) if not name.startswith("_")}
    assert members - {*vars(wrapper)} == LEFT_OUT[wrapper]
