-- ARGV: session, token, "0" for a write that gives it no time: a replica that has it has the writes
-- before it, too; otherwise gives the session its window from now on. Behind them the requests that the
-- client considers owned. Answers 0, or a list of those that are not: their records were deleted.
--#include parts/sessions.lua
local id, token, without_time = ARGV[1], ARGV[2], ARGV[3] == '0'
if not is_current(id, token) then
  return over(id)
end
local key, lacking = P .. 's:' .. id, {}
if without_time then
  whatever_memory()
  call('HSET', key, 'a', token)
else
  touch(id)
end
local path = call('HGET', key, 'n')
for first = 4, #ARGV, 500 do
  local last = math.min(first + 499, #ARGV)
  local places = call('HMGET', key, unpack(ARGV, first, last))
  local short, keys = {}, {}
  for each, place in ipairs(places) do
    local request_id = ARGV[first + each - 1]
    local order, name = string.match(place or '', PLACE)
    if order and string.sub(place, 1, 1) == '+' then
      short[#short + 1] = {request_id, id .. ' ' .. request_id .. ' ' .. order .. ' '}
      keys[#keys + 1] = P .. 'm:' .. path .. ':' .. name
    else
      local record = order and redis.pcall('HGET', P .. 'm:' .. path .. ':' .. name, order)
      local r = type(record) == 'string' and parse(record)
      if not r or r.id ~= id or r.granted == '0' then
        lacking[#lacking + 1] = tonumber(request_id)
      end
    end
  end
  for each, record in ipairs(#keys > 0 and call('MGET', unpack(keys)) or {}) do
    local mine = short[each][2]
    if not record or string.sub(record, 1, #mine) ~= mine then
      lacking[#lacking + 1] = tonumber(short[each][1])
    end
  end
end
return #lacking > 0 and lacking or 0
