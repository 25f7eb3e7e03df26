-- Somebody watches: for a minute changes are published, and each tick of theirs adds to that.
--#head
call('HSET', KEYS[1], 'v', string.format('%.0f', now + 60000000))
return 0
