-- ARGV: session, token. Renews the session, and answers the microseconds for which a former attachment
-- may consider leases held.
--#head
--#body
--#rest
local id = ARGV[1]
if not is_current(id, ARGV[2]) then
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
