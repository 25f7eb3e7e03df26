-- Somebody watches: for a minute changes are published, and each tick of theirs adds to that.
-- Answers what `be_watched` says.
--#include parts/sessions.lua
whatever_memory()
return be_watched()
