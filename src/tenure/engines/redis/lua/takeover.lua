-- ARGV: node, session, the new token's secret half, channel, key, its new window in microseconds
-- (empty: the one that it has), epoch.
-- Answers {"ok", token, window in microseconds, description}; or why not.
--#include parts/sessions.lua
local path, id, secret, channel, key, new_window, known_epoch = unpack(ARGV)
if known_epoch ~= epoch then
  return {'lost'}
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
local session = P .. 's:' .. id
local former, node, window, liveness, its_key, former_channel, attached, till, description =
  unpack(call('HMGET', session, 'a', 'n', 'w', 'l', 'k', 'c', 't', 'u', 'd'))
if node ~= path then
  return {'gone'}
elseif its_key ~= key or liveness ~= 'window' then
  return {'refused', liveness, its_key}
end
whatever_memory()
local number, former_secret = string.match(former, '^(%d+)%.(.*)$')
if former_secret ~= secret then -- or else sent before
  number = int(number + 1)
  if attached == '1' then
    call('HSET', session, 'B' .. former, till) -- until then the former attachment may hold leases
    call('PUBLISH', former_channel, 'T ' .. former .. ' ')
  end
end
local token = number .. '.' .. secret
call('HSET', session, 'a', token, 'c', channel, 't', '1')
if new_window ~= '' then
  window = new_window
  call('HSET', session, 'w', window)
  if tonumber(window) > tonumber(call('HGET', KEYS[1], 'g') or '0') then
    call('HSET', KEYS[1], 'g', window)
  end
end
touch(id)
return {'ok', token, tonumber(window), description}
