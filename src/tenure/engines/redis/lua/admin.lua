-- What administrators do. ARGV: what, node, ...
--   create_node, node, configuration, a number of the caller's
--   alter_node, node, the former configuration, the new one
--   describe_node, node / list_nodes, "" / store_time, ""
--   list_sessions, node; and for a part of them, an id and how many sessions behind it
--   drop_node, node, force
--   end_session, node, session
--   evict, node, semaphore, order id
--#include parts/sessions.lua
local what, path = ARGV[1], ARGV[2]
local nodes = P .. 'nodes'
if what == 'list_nodes' then
  return {'ok', call('HKEYS', nodes)}
elseif what == 'store_time' then
  return {'ok', instant}
elseif what == 'create_node' then
  local new_config, number = ARGV[3], ARGV[4]
  local token = P .. 'a:' .. number
  if call('HSETNX', nodes, path, new_config) == 1 then
    call('SET', token, 1, 'PX', 60000)
    call('HSET', P .. 'born', path, instant) -- rates of a former node of this path are not its own
  elseif call('EXISTS', token) == 0 then
    return {'exists'}
  end
  return {'ok'}
end
local config = call('HGET', nodes, path)
if not config then
  return {'no node'}
end
if what == 'alter_node' then
  local former, new_config = ARGV[3], ARGV[4]
  if config ~= former and config ~= new_config then
    return {'changed'}
  end
  call('HSET', nodes, path, new_config)
  return {'ok'}
end
expire()
local ids
if what == 'list_sessions' and ARGV[4] == '1' then -- a look for one session reads no others
  local following = int(ARGV[3] + 1)
  ids = call('HGET', P .. 's:' .. following, 'n') == path and {following}
end
ids = ids or call('SMEMBERS', P .. 'S:' .. path)
if what == 'describe_node' then
  return {'ok', config, #ids}
elseif what == 'list_sessions' then
  local found, most = {}, tonumber(ARGV[4] or math.huge)
  if ARGV[3] then
    local after, numbers = tonumber(ARGV[3]), {}
    for _, id in ipairs(ids) do
      local number = tonumber(id)
      if number > after then
        numbers[#numbers + 1] = number
      end
    end
    table.sort(numbers)
    ids = numbers
  end
  for _, each in ipairs(ids) do
    local id = int(each)
    if #found == most then
      break
    end
    local description, window, attached, till =
      unpack(call('HMGET', P .. 's:' .. id, 'd', 'w', 't', 'u'))
    if description then
      found[#found + 1] = {id, description, window, attached, int(now - (till - window))}
    end
  end
  return {'ok', found}
elseif what == 'drop_node' then
  local force, attached = ARGV[3] == '1', 0
  for _, id in ipairs(ids) do
    if call('HGET', P .. 's:' .. id, 't') == '1' then
      attached = attached + 1
    end
  end
  if attached > 0 and not force then
    return {'busy', attached}
  end
  for _, id in ipairs(ids) do
    end_session(id, 'the node ' .. path .. ' was dropped')
  end
  quarantined = true -- no session is left that could be granted anything
  settle()
  for _, name in ipairs(call('SMEMBERS', P .. 'M:' .. path)) do
    call('DEL', P .. 'm:' .. path .. ':' .. name, P .. 'w:' .. path .. ':' .. name)
  end
  call('DEL', P .. 'M:' .. path, P .. 'S:' .. path)
  call('HDEL', nodes, path)
  call('HDEL', P .. 'born', path)
  return {'ok'}
elseif what == 'end_session' then
  local id = ARGV[3]
  if call('HGET', P .. 's:' .. id, 'n') ~= path then
    return {'ok', 0}
  end
  end_session(id, 'an administrator ended it')
  settle()
  return {'ok', 1}
end
local name, order = ARGV[3], ARGV[4]
local m = load(path, name)
if not m then
  return {'missing'}
end
local r = string.find(order, '^%d') and request_in(m, order)
if not r then
  return {'ok', 0}
end
remove(m, order, r, 'e')
settle()
return {'ok', 1}
