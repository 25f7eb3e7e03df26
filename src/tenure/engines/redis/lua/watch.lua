-- A client watches: for a minute changes are published, and each tick of that client adds to it.
-- Answers what `be_watched` says.
--#include parts/sessions.lua
whatever_memory()
return be_watched()
