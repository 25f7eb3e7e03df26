-- ARGV: session, token, "close" or "detach", the tokens that the session may have by now.
--#head
--#body
--#rest
local id = ARGV[1]
local key, mine = P .. 's:' .. id, false
for at = 4, #ARGV do
  mine = mine or is_current(id, ARGV[at])
end
if not mine then
  for at = 4, #ARGV do
    if call('HDEL', key, 'B' .. ARGV[at]) == 1 then -- it was taken over, and gives up
      tell(id, 'A', '')
    end
  end
  return over(id)
end
if ARGV[3] == 'detach' then
  touch(id)
  call('HSET', key, 't', '0', 'c', '')
  return 0
end
expire()
end_session(id)
settle()
return 0
