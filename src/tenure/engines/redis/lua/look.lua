-- ARGV: session, token, request ids. What has become of each: an order id if it owns, a negative one
-- if it waits, "!kind order" if it was taken out, "" if nothing is known of it. The last answer is due().
--#include parts/sessions.lua
--#include parts/mending.lua
local id, token = unpack(ARGV, 1, 2)
if not is_current(id, token) then
  return over(id)
end
expire()
local key = P .. 's:' .. id
local path = call('HGET', key, 'n')
local found = {'ok'}
for _, request_id in ipairs({unpack(ARGV, 3)}) do
  local place = call('HGET', key, request_id)
  local order, name = string.match(place or '', PLACE)
  local r = order and request_in(load(path, name, place), order)
  if r and r.granted == '0' and (call('ZRANK', P .. 'w:' .. path .. ':' .. name, order) or 0) == 0 then
    mend(load(path, name, place)) -- the first waiter sees to it
    r = request_in(load(path, name), order)
  end
  if r then
    found[#found + 1] = r.granted ~= '0' and tonumber(order) or -tonumber(order)
  else
    found[#found + 1] = not order and place or ''
  end
end
found[#found + 1] = due()
return found
