-- The usual case, as long as it lasts: mutexes without other owners or waiters, in their short form.
while at <= last do
  local kind, hold = ARGV[at], ARGV[at + 1]
  local name
  if kind == 'w' then
    local place, answer = places[hold], -1
    if place then
      local number
      number, name = string.match(place, '^%+(%d+) (.*)$')
      if not number then
        break
      end
      local record = redis.pcall('GETDEL', prefix .. name)
      local mine = id .. ' ' .. hold .. ' ' .. number .. ' '
      if type(record) == 'string' and string.sub(record, 1, #mine) == mine then
        answer = 0
      elseif type(record) == 'string' then -- keys were lost
        call('SET', prefix .. name, record, 'PX', KEEP)
      end
      places[hold] = nil
      gone[#gone + 1] = hold
    end
    answers[#answers + 1] = answer
    at = at + 2
  else
    local data, width = '', 3
    if kind ~= 'm' then
      data, width = ARGV[at + 4], 7
      if kind == 'E' or ARGV[at + 3] ~= WHOLE or ARGV[at + 6] ~= '1' or #data > SMALL then
        break
      end
    end
    name = ARGV[at + 2]
    if quarantined or (known and known[path .. ':' .. name]) then
      break
    end
    order = math.max(order + 1, now)
    local number = order == now and instant or string.format('%.0f', order)
    local record = id .. ' ' .. hold .. ' ' .. number .. ' ' .. instant
    if data ~= '' then
      record = record .. ' ' .. data
    end
    local done = redis.pcall('SET', prefix .. name, record, 'NX', 'PX', KEEP)
    if not done or done.err then
      break
    end
    local place = '+' .. number .. ' ' .. name
    newest = number
    places[hold] = place
    put[#put + 1] = hold
    put[#put + 1] = place
    answers[#answers + 1] = order
    at = at + width
  end
  if name and watched then
    call('PUBLISH', P .. 'c:' .. meta[1] .. ':' .. path .. ':' .. name, 'b')
  end
  if name and known then
    known[path .. ':' .. name] = nil
  end
end
