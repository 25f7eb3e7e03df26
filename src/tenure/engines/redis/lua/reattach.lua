-- ARGV: session, the new token, the channel, "1" if it is renewed, too, and every token that the
-- session may have by now. The same program after a gap: whatever is under way under another token is
-- refused from now on.
--#include parts/sessions.lua
local id, token, channel, renewed = unpack(ARGV, 1, 4)
local key = P .. 's:' .. id
local current, till = unpack(call('HMGET', key, 'a', 'u'))
if not current or tonumber(till) <= now then
  return over(id)
end
for _, possible in ipairs({token, unpack(ARGV, 5)}) do
  if possible == current then
    whatever_memory()
    call('HSET', key, 'a', token, 'c', channel, 't', '1')
    if renewed == '1' then
      touch(id)
    end
    return {'ok'}
  end
end
return {'taken'}
