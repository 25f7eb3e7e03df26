-- A part of a queue. ARGV: a node, a semaphore, "0" for its owners or "1" for its waiters, an order id,
-- and how many requests behind it.
-- Answers {"ok", description} with these requests.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local path, name, waiters, after, most = unpack(ARGV)
if call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
local m = load(path, name)
if not m then
  return {'missing'}
end
local orders = {}
if waiters == '1' then
  orders = call('ZRANGEBYSCORE', m.waiters, '(' .. after, '+inf', 'LIMIT', '0', most)
else
  local first = tonumber(after)
  for order in pairs(owners_of(m)) do
    if tonumber(order) > first then
      orders[#orders + 1] = order
    end
  end
  table.sort(orders, function(one, other) return tonumber(one) < tonumber(other) end)
end
local found = {}
for at = 1, math.min(#orders, most) do
  local order = orders[at]
  local record = m.record[order] or call('HGET', m.key, order)
  if record then
    found[#found + 1] = described_request(order, record, data_of(m, order))
  end
end
return {'ok', describe(m, 'none', found)}
