-- Somebody watches: for a minute changes are published, and each tick of theirs adds to that.
--#head
--#body
--#rest
whatever_memory()
be_watched()
return 0
