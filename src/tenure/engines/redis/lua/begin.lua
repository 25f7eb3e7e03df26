-- ARGV: session, token, new description. A take-over is complete: what the session has in queues,
-- each {request id, name, order id, count, data, lasting, granted}.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local id, token, description = unpack(ARGV)
if not is_current(id, token) then
  return over(id)
end
expire()
touch(id)
local key = P .. 's:' .. id
call('HSET', key, 'd', description)
local path = call('HGET', key, 'n')
local found = {}
local fields = call('HGETALL', key)
for at = 1, #fields, 2 do
  if string.find(fields[at], '^%d') then
    local order, name = string.match(fields[at + 1], PLACE)
    if order then
      local m = load(path, name)
      local r = request_in(m, order)
      if r then
        found[#found + 1] = {
          fields[at], name, order, r.count, data_of(m, order),
          m.lasting and 1 or 0, r.granted ~= '0' and 1 or 0,
        }
      end
    else
      call('HDEL', key, fields[at])
    end
  elseif string.find(fields[at], '^[B=]') then
    call('HDEL', key, fields[at])
  end
end
return {'ok', found, due()}
