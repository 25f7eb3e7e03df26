-- Somebody watches: for a minute changes are published, and each tick of theirs adds to that.
--#head
--#body
--#rest
whatever_memory()
call('HSET', KEYS[1], 'v', int(now + 60000000))
return 0
