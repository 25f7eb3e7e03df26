-- ARGV: session, token, a name, an order id. The place of that request in its queue: 0 if it owns, 1 for
-- the first waiter; -1 if it is not there.
--#include parts/sessions.lua
--#include parts/mending.lua
local id, token, name, order = unpack(ARGV)
if not is_current(id, token) then
  return over(id)
end
expire()
local path = call('HGET', P .. 's:' .. id, 'n')

local function place()
  local m = load(path, name)
  local r = request_in(m, order)
  if not r then
    return -1
  elseif r.granted ~= '0' then
    return 0
  end
  local ahead = call('ZRANK', m.waiters, order)
  return ahead and ahead + 1
end

local found = place()
if not found then -- keys of the queue were deleted
  mend(load(path, name))
  found = place()
end
return found or -1
