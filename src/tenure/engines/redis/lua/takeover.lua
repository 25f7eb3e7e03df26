-- ARGV: node, session, the new token's secret half, channel, key, its new window in microseconds
-- (empty: the one that it has), epoch.
-- Answers {"ok", token, window in microseconds, description}; or why not.
--#head
--#body
--#rest
local path, id = ARGV[1], ARGV[2]
if ARGV[7] ~= meta[1] then
  return {'lost'}
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
local key = P .. 's:' .. id
local s = call('HMGET', key, 'a', 'n', 'w', 'l', 'k', 'c', 't', 'u', 'd')
if s[2] ~= path then
  return {'gone'}
elseif s[5] ~= ARGV[5] or s[4] ~= 'window' then
  return {'refused', s[4], s[5]}
end
whatever_memory()
local number, secret = string.match(s[1], '^(%d+)%.(.*)$')
if secret ~= ARGV[3] then -- or else sent before
  number = int(number + 1)
  if s[7] == '1' then
    call('HSET', key, 'B' .. s[1], s[8]) -- until then the former attachment may hold leases
    call('PUBLISH', s[6], 'T ' .. s[1] .. ' ')
  end
end
local token = number .. '.' .. ARGV[3]
call('HSET', key, 'a', token, 'c', ARGV[4], 't', '1')
if ARGV[6] ~= '' then
  s[3] = ARGV[6]
  call('HSET', key, 'w', s[3])
  if tonumber(s[3]) > tonumber(call('HGET', KEYS[1], 'g') or '0') then
    call('HSET', KEYS[1], 'g', s[3])
  end
end
touch(id)
return {'ok', token, tonumber(s[3]), s[9]}
