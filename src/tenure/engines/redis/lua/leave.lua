-- ARGV: session, token, "close" or "detach", the tokens that the session may have by now.
--#include parts/sessions.lua
local id, how, tokens = ARGV[1], ARGV[3], {unpack(ARGV, 4)}
local key, mine = P .. 's:' .. id, false
for _, token in ipairs(tokens) do
  mine = mine or is_current(id, token)
end
if not mine then
  for _, token in ipairs(tokens) do
    if call('HDEL', key, 'B' .. token) == 1 then -- it was taken over, and gives up
      push(id, 'A', '')
    end
  end
  return over(id)
end
if how == 'detach' then
  touch(id)
  call('HSET', key, 't', '0', 'c', '')
  return 0
end
expire()
end_session(id)
settle()
return 0
