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

-- The records of a semaphore's owners, by order id. The reading ends with the last of them.
local function owners_of(m)
  if m.short then
    return m.record
  end
  local found, left, cursor = {}, m.owners, '0'
  while left > 0 do
    local fields
    cursor, fields = unpack(call('HSCAN', m.key, cursor, 'MATCH', '[0-9]*', 'COUNT', '500'))
    for at = 1, #fields, 2 do
      local order, record = fields[at], fields[at + 1]
      if not found[order] and parse(record).granted ~= '0' then
        found[order] = record
        left = left - 1
      end
    end
    if cursor == '0' then
      break
    end
  end
  return found
end

local function described_request(order, record, data)
  local description, till = unpack(call('HMGET', P .. 's:' .. parse(record).id, 'd', 'u'))
  return {order, record, data, description or '', till or '0'}
end

-- Everything in a semaphore's queue: {order, record, data, session's description, its end} each.
-- With `owners`, of the owners alone.
local function requests_of(m, owners)
  local records, data = owners and owners_of(m) or m.record, {}
  if not owners and not m.short then
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
    local of_it = (owners or m.short) and data_of(m, order) or data[order] or ''
    found[#found + 1] = described_request(order, record, of_it)
  end
  return found
end

-- `wanted`: 'all' requests, 'owners', or none, but those that are given.
local function describe(m, wanted, given)
  local data = not m.short and call('HGET', m.key, 'd') or ''
  local held = m.whole and m.limit or int(m.held)
  local requests = given
  if not requests then -- without an exact number of tokens, the owners are counted
    local needed = wanted ~= 'none' or not (m.exact or m.whole or m.owners == 0)
    requests = needed and requests_of(m, wanted ~= 'all') or {}
  end
  return {m.name, data, m.limit, m.lasting and 1 or 0, held, m.waiting, instant, requests}
end
