-- Somebody watches: for a minute changes are published, and each tick of theirs adds to that.
-- Answers what `be_watched` says.
--#head
--#body
--#rest
whatever_memory()
return be_watched()
