-- ARGV: session, token. Renews the session, and answers the microseconds for which a former attachment
-- may consider leases held.
--#include parts/sessions.lua
local id, token = unpack(ARGV)
if not is_current(id, token) then
  return over(id)
end
touch(id)
local till = now
local fields = call('HGETALL', P .. 's:' .. id)
for at = 1, #fields, 2 do
  if string.sub(fields[at], 1, 1) == 'B' then
    till = math.max(till, tonumber(fields[at + 1]))
  end
end
return till - now
