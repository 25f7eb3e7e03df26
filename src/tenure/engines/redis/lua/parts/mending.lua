-- Queues of which keys or fields were deleted.
--#include parts/queues.lua
-- A substitute session, for what former holders whose records were deleted may consider held. It
-- ends when all have noticed: after the longest recovery window.
local function substitute(path)
  local id = int(call('HINCRBY', KEYS[1], 'i', 1))
  local window = call('HGET', KEYS[1], 'w') or '1800000000'
  local till = int(now + window)
  call('HSET', P .. 's:' .. id, 'a', '0.' .. id, 'n', path, 'w', window, 'l', 'process', 'k', '',
    'd', 'a holder whose records were deleted', 'c', '', 't', '0', 'f', instant, 'u', till)
  call('PEXPIRE', P .. 's:' .. id, KEEP)
  call('SADD', P .. 'S:' .. path, id)
  call('ZADD', P .. 'x', till, id)
  return id
end

-- Have a queue show what it may still grant, if keys or fields of it, or of its owners' sessions, were
-- deleted.
local function mend(m)
  local records = m.record
  if not m.short then
    records = {}
    local fields = call('HGETALL', m.key)
    for at = 1, #fields, 2 do
      if string.find(fields[at], '^%d') then
        records[fields[at]] = fields[at + 1]
      end
    end
  end
  local owners, held, whole, first, other = 0, 0, false, math.huge, nil
  local waiting, lost = {}, {}
  for order, record in pairs(records) do
    local r = parse(record)
    first = math.min(first, tonumber(order))
    if r.granted == '0' then
      waiting[#waiting + 1] = order
    else
      owners = owners + 1
      held = held + amount(m, r.count)
      whole = whole or r.count == m.limit
      local place, till = unpack(call('HMGET', P .. 's:' .. r.id, r.request_id, 'u'))
      if not place or string.match(place, PLACE) ~= order then
        lost[#lost + 1] = order
      elseif not call('ZSCORE', P .. 'x', r.id) then
        whatever_memory()
        call('ZADD', P .. 'x', till, r.id)
      end
    end
  end
  whole = whole and owners == 1 -- after its limit was lowered, several may have as much
  if #lost == 0 and owners >= m.owners and #waiting == call('ZCARD', m.waiters) then
    return false
  end
  whatever_memory()
  lengthen(m)
  for _, order in ipairs(lost) do
    other = other or substitute(m.path)
    local r = parse(records[order])
    r.id, r.request_id = other, order
    write_record(m, order, r)
    call('HSET', P .. 's:' .. other, order, order .. ' ' .. m.name)
  end
  if owners < m.owners then
    other = other or substitute(m.path)
    local order = int(math.min(first, now) - 1)
    local count = m.whole and m.limit or int(math.max(1, m.held - held))
    write_record(m, order, {
      id = other, request_id = order, count = count, joined = instant, granted = instant, deadline = '0',
    })
    call('HSET', P .. 's:' .. other, order, order .. ' ' .. m.name)
    owners, held, whole = owners + 1, held + amount(m, count), m.whole
  end
  for _, order in ipairs(waiting) do
    call('ZADD', m.waiters, order, order)
  end
  m.owners, m.held, m.whole, m.waiting = owners, held, whole, #waiting
  dirty[m] = true
  settle()
  return true
end
