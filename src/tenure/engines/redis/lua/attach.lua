-- ARGV: node, token, channel, window in microseconds, description, liveness, key, most sessions,
-- epoch.
-- Answers {"ok", session}.
--#head
--#body
--#rest
local path, token = ARGV[1], ARGV[2]
if ARGV[9] ~= meta[1] then
  return {'lost'}
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
local before = call('GET', P .. 'a:' .. token)
if before then -- sent before, and its answer was never seen
  return {'ok', tonumber(before)}
end
expire()
if call('SCARD', P .. 'S:' .. path) >= tonumber(ARGV[8]) then
  return {'full'}
end
local id = int(call('HINCRBY', KEYS[1], 'i', 1))
call('SET', P .. 'a:' .. token, id, 'PX', 60000)
call('HSET', P .. 's:' .. id, 'a', token, 'n', path, 'w', ARGV[4], 'd', ARGV[5], 'l', ARGV[6],
  'k', ARGV[7], 'c', ARGV[3], 't', '1', 'f', '0', 'u', '0')
call('SADD', P .. 'S:' .. path, id)
local largest = call('HGET', KEYS[1], 'g') or '0'
if tonumber(ARGV[4]) > tonumber(largest) then
  call('HSET', KEYS[1], 'g', ARGV[4])
end
touch(id)
return {'ok', tonumber(id)}
