-- ARGV: this Redis's run id ("" if it does not tell), fresh, an id for a new epoch, the epoch that the
-- client knows ("" for none), the namespace's longest recovery window in microseconds, the database,
-- and for a namespace without an epoch: for how many microseconds nothing is granted ("" if the client
-- has yet to find out), and why.
-- Answers {"ok", epoch, quarantine that is left, why, whether "fresh" would end it}; or {"absent"},
-- or {"window", the longest recovery window here}, and then nothing was changed.
--
-- A namespace without its epoch is new, or has lost its data. Holders may consider leases held that
-- are forgotten here, so nothing is granted until their windows are over. A client says for how long
-- (namespace.py). "Fresh" ends that later, too, unless a client has come that knew another epoch,
-- or the data is known to be lost ("n" is not "1").
local call = redis.call
local P = string.sub(KEYS[1], 1, -5)
local clock = call('TIME')
local started = clock[1] * 1000000 + clock[2]
-- Of "meta", besides what parts/namespace.lua names: b when the epoch began, g the longest window of
-- any session, r the server's run id, n whether the namespace may be new, w the longest recovery
-- window, d the database, h why nothing is granted, i the last session.
local run_id, fresh, new_epoch, known_epoch, window, database, wait, reason = unpack(ARGV)
local here_epoch, began, till_before, former_run_id, may_be_new, published_before, window_before,
  former_database, why =
  unpack(call('HMGET', KEYS[1], 'e', 'b', 'q', 'r', 'n', 'v', 'w', 'd', 'h'))
local is_new = not here_epoch
why = why or 'lost'
if is_new and wait == '' then
  return {'absent'}
elseif not is_new and window_before ~= window then
  -- It may change as long as no session lives that relies on it, nor one from before a loss of data.
  local longest = window_before and tonumber(till_before) > started and window + 1 or 0
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'x', string.format('(%.0f', started), '+inf')) do
    longest = math.max(longest, tonumber(call('HGET', P .. 's:' .. id, 'w') or '0'))
  end
  if longest > (window_before and 0 or tonumber(window)) then -- an earlier version of tenure kept none
    return {'window', window_before or string.format('%.0f', longest)}
  end
end
local unknown, ended = may_be_new == '1', false
local function quarantine(till) -- until then, and more than the usual case as long as changes are watched
  local q, p = string.format('%.0f', till), string.format('%.0f', math.max(till, published_before or 0))
  call('HSET', KEYS[1], 'p', p, 'q', q, 'n', unknown and '1' or '0', 'h', why)
end
if is_new then
  why = reason
  unknown = known_epoch == '' and why ~= 'lost'
  quarantine(tonumber(wait) > 0 and started + wait or 0)
  call('HSET', KEYS[1], 'o', '0', 'e', new_epoch, 'b', string.format('%.0f', started),
    'i', string.format('%.0f', math.floor(started / 1000)), 'r', run_id, 'g', '0',
    't', string.format('%.0f', started))
elseif former_database and former_database ~= database then
  unknown, why = false, 'moved'
  quarantine(math.max(tonumber(till_before), started + window))
elseif known_epoch ~= '' and known_epoch ~= here_epoch then
  unknown, why = false, 'lost'
  quarantine(math.max(tonumber(till_before), math.min(tonumber(began), started) + window))
elseif fresh == '1' and known_epoch == '' and unknown and tonumber(till_before) > started then
  quarantine(started)
  ended = true
end
if window_before ~= window or former_database ~= database then
  call('HSET', KEYS[1], 'w', window, 'd', database)
end
if call('HEXISTS', P .. 'nodes', '/default') == 0 then -- or else a full memory refuses the script
  call('HSET', P .. 'nodes', '/default', '{}')
end
--#include parts/sessions.lua
--#include parts/descriptions.lua
-- Another server, or the same one started again.
if not is_new and run_id ~= '' and former_run_id ~= run_id then
  whatever_memory()
  call('HSET', KEYS[1], 'r', run_id)
  for _, id in ipairs(call('ZRANGE', P .. 'x', 0, -1)) do
    local session = P .. 's:' .. id
    local liveness, path, till, with_grace = unpack(call('HMGET', session, 'l', 'n', 'u', 'y'))
    if liveness == 'window' and till ~= with_grace then -- once, until it is renewed
      touch(id, grace_of(path))
      call('HSET', session, 'y', call('HGET', session, 'u'))
    end
  end
end
local no_sessions = call('EXISTS', P .. 'x') == 0 -- then no session has a request
if no_sessions or ended then
  for _, path in ipairs(call('HKEYS', P .. 'nodes')) do
    for _, name in ipairs(call('SMEMBERS', P .. 'M:' .. path)) do
      local m = load(path, name)
      if m and no_sessions and m.owners + m.waiting > 0 then
        for _, each in ipairs(requests_of(m)) do
          leave(m, each[1], parse(each[2]))
        end
      elseif m and m.waiting > 0 then
        dirty[m] = true
      end
    end
  end
  settle()
end
expire()
return {'ok', epoch, quarantined and quarantine_end - now or 0, why, unknown and 1 or 0}
