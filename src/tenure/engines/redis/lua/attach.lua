-- ARGV: node, token, channel, window in microseconds, description, liveness, key, most sessions,
-- epoch.
-- Answers {"ok", session}.
--#include parts/sessions.lua
local path, token, channel, window, description, liveness, key, most, known_epoch = unpack(ARGV)
if known_epoch ~= epoch then
  return {'lost'}
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
local before = call('GET', P .. 'a:' .. token)
if before then -- sent before, and its answer was never seen
  return {'ok', tonumber(before)}
end
expire()
if call('SCARD', P .. 'S:' .. path) >= tonumber(most) then
  return {'full'}
end
local id = int(call('HINCRBY', KEYS[1], 'i', 1))
call('SET', P .. 'a:' .. token, id, 'PX', 60000)
call('HSET', P .. 's:' .. id, 'a', token, 'n', path, 'w', window, 'd', description, 'l', liveness,
  'k', key, 'c', channel, 't', '1', 'f', '0', 'u', '0')
call('SADD', P .. 'S:' .. path, id)
local largest = call('HGET', KEYS[1], 'g') or '0'
if tonumber(window) > tonumber(largest) then
  call('HSET', KEYS[1], 'g', window)
end
touch(id)
return {'ok', tonumber(id)}
