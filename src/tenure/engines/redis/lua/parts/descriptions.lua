-- Descriptions of semaphores, for programs and administrators.
--#include parts/queues.lua
local function data_of(m, order)
  if m.short then
    return m.short.data
  end
  return call('HGET', m.key, 'D' .. order) or ''
end

-- The names of the ephemeral semaphores of a node: those that its sessions use.
local function ephemeral_names(path)
  local known, names = {}, {}
  for _, id in ipairs(call('SMEMBERS', P .. 'S:' .. path)) do
    local fields = call('HGETALL', P .. 's:' .. id)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      if name and not known[name] then
        known[name] = true
        local m = load(path, name)
        if m and not m.lasting then
          names[#names + 1] = name
        end
      end
    end
  end
  return names
end

-- Everything in a semaphore's queue: {order, record, data, session's description, its end} each.
-- With `owners`, of the owners alone: the cost of a session's description is not paid for waiters.
local function requests_of(m, owners)
  local records, data = m.record, {}
  if m.short then
    data[m.short.order] = m.short.data
  else
    local fields = call('HGETALL', m.key)
    records = {}
    for at = 1, #fields, 2 do
      if string.find(fields[at], '^%d') then
        records[fields[at]] = fields[at + 1]
      elseif string.sub(fields[at], 1, 1) == 'D' then
        data[string.sub(fields[at], 2)] = fields[at + 1]
      end
    end
  end
  local found = {}
  for order, record in pairs(records) do
    local r = parse(record)
    if not owners or r.granted ~= '0' then
      local description, till = unpack(call('HMGET', P .. 's:' .. r.id, 'd', 'u'))
      found[#found + 1] = {order, record, data[order] or '', description or '', till or '0'}
    end
  end
  return found
end

-- `wanted`: 'all' requests, 'owners', or none.
local function describe(m, wanted)
  local data = not m.short and call('HGET', m.key, 'd') or ''
  local requests = (wanted ~= 'none' or not m.exact) and requests_of(m, wanted ~= 'all') or {}
  local held = m.whole and m.limit or int(m.held)
  return {m.name, data, m.limit, m.lasting and 1 or 0, held, m.waiting, instant, requests}
end
