-- What administrators do. ARGV: what, node, ...
--   create_node, node, configuration, a number of the caller's
--   alter_node, node, the former configuration, the new one
--   describe_node, node / list_nodes, "" / list_sessions, node / store_time, ""
--   drop_node, node, force
--   end_session, node, session
--   evict, node, semaphore, order id
--#head
--#body
--#rest
local what, path = ARGV[1], ARGV[2]
local nodes = P .. 'nodes'
if what == 'list_nodes' then
  return {'ok', call('HKEYS', nodes)}
elseif what == 'store_time' then
  return {'ok', instant}
elseif what == 'create_node' then
  local token = P .. 'a:' .. ARGV[4]
  if call('HSETNX', nodes, path, ARGV[3]) == 1 then
    call('SET', token, 1, 'PX', 60000)
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
  if config ~= ARGV[3] and config ~= ARGV[4] then
    return {'changed'}
  end
  call('HSET', nodes, path, ARGV[4])
  return {'ok'}
end
expire()
local ids = call('SMEMBERS', P .. 'S:' .. path)
if what == 'describe_node' then
  return {'ok', config, #ids, call('SCARD', P .. 'M:' .. path) + #ephemeral_names(path)}
elseif what == 'list_sessions' then
  local found = {}
  for _, id in ipairs(ids) do
    local s = call('HMGET', P .. 's:' .. id, 'd', 'w', 't', 'u')
    if s[1] then
      found[#found + 1] = {id, s[1], s[2], s[3], int(now - (s[4] - s[2]))}
    end
  end
  return {'ok', found}
elseif what == 'drop_node' then
  local attached = 0
  for _, id in ipairs(ids) do
    if call('HGET', P .. 's:' .. id, 't') == '1' then
      attached = attached + 1
    end
  end
  if attached > 0 and ARGV[3] ~= '1' then
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
  return {'ok'}
elseif what == 'end_session' then
  if call('HGET', P .. 's:' .. ARGV[3], 'n') ~= path then
    return {'ok', 0}
  end
  end_session(ARGV[3], 'an administrator ended it')
  settle()
  return {'ok', 1}
end
local m = load(path, ARGV[3])
if not m then
  return {'missing'}
end
local r = string.find(ARGV[4], '^%d') and request_in(m, ARGV[4])
if not r then
  return {'ok', 0}
end
remove(m, ARGV[4], r, 'e')
settle()
return {'ok', 1}
