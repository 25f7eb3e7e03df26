-- ARGV: session, token, "0" for a write that gives it no time: a replica that has it has the writes
-- before it, too; otherwise gives the session its window from now on. Behind them the holds that the
-- client considers owned. Answers 0, or a list of those that are not: their records were deleted.
--#head
--#body
--#rest
if not is_current(ARGV[1], ARGV[2]) then
  return over(ARGV[1])
end
if ARGV[3] == '0' then
  whatever_memory()
  call('HSET', P .. 's:' .. ARGV[1], 'a', ARGV[2])
else
  touch(ARGV[1])
end
local key, lacking = P .. 's:' .. ARGV[1], {}
local path = call('HGET', key, 'n')
for first = 4, #ARGV, 500 do
  local last = math.min(first + 499, #ARGV)
  local places = call('HMGET', key, unpack(ARGV, first, last))
  local short, keys = {}, {}
  for each, place in ipairs(places) do
    local hold = ARGV[first + each - 1]
    local order, name = string.match(place or '', PLACE)
    if order and string.sub(place, 1, 1) == '+' then
      short[#short + 1] = {hold, ARGV[1] .. ' ' .. hold .. ' ' .. order .. ' '}
      keys[#keys + 1] = P .. 'm:' .. path .. ':' .. name
    else
      local record = order and redis.pcall('HGET', P .. 'm:' .. path .. ':' .. name, order)
      local r = type(record) == 'string' and parse(record)
      if not r or r.id ~= ARGV[1] or r.granted == '0' then
        lacking[#lacking + 1] = tonumber(hold)
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
