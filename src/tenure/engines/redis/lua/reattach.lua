-- ARGV: session, the new token, the channel, "1" if it is renewed, too, and every token that the
-- session may have by now. The same program after a gap: whatever is under way under another token is
-- refused from now on.
--#head
--#body
--#rest
local id = ARGV[1]
local key = P .. 's:' .. id
local s = call('HMGET', key, 'a', 'u')
if not s[1] or tonumber(s[2]) <= now then
  return over(id)
end
for at = 1, #ARGV do
  if (at == 2 or at > 4) and ARGV[at] == s[1] then
    whatever_memory()
    call('HSET', key, 'a', ARGV[2], 'c', ARGV[3], 't', '1')
    if ARGV[4] == '1' then
      touch(id)
    end
    return {'ok'}
  end
end
return {'taken'}
