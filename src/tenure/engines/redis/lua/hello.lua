-- ARGV: this Redis's run id ("" if it does not tell), fresh, an id for a new epoch, the epoch that the client knows ("" for
-- none), the namespace's longest recovery window in microseconds, the database, and for a namespace
-- without an epoch: for how many microseconds nothing is granted ("" if the client has yet to find
-- out), and why.
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
-- Of "meta", besides what `head` names: b when the epoch began, g the longest window of any session, r
-- the server's run id, n whether the namespace may be new, w the longest recovery window, d the
-- database, h why nothing is granted, i the last session.
local m = call('HMGET', KEYS[1], 'e', 'b', 'q', 'r', 'n', 'v', 'w', 'd', 'h')
local window, is_new, why = tonumber(ARGV[5]), not m[1], m[9] or 'lost'
local fresh = ARGV[2] == '1' and ARGV[4] == ''
if is_new and ARGV[7] == '' then
  return {'absent'}
elseif not is_new and m[7] ~= ARGV[5] then
  -- It may change as long as no session lives that relies on it, nor one from before a loss of data.
  local longest = m[7] and tonumber(m[3]) > started and window + 1 or 0
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'x', string.format('(%.0f', started), '+inf')) do
    longest = math.max(longest, tonumber(call('HGET', P .. 's:' .. id, 'w') or '0'))
  end
  if longest > (m[7] and 0 or window) then -- an earlier version of tenure kept none
    return {'window', m[7] or string.format('%.0f', longest)}
  end
end
local unknown, ended = m[5] == '1', false
local function quarantine(till) -- until then, and more than the usual case as long as changes are watched
  local q, p = string.format('%.0f', till), string.format('%.0f', math.max(till, m[6] or 0))
  call('HSET', KEYS[1], 'p', p, 'q', q, 'n', unknown and '1' or '0', 'h', why)
end
if is_new then
  why = ARGV[8]
  unknown = ARGV[4] == '' and why ~= 'lost'
  local wait = tonumber(ARGV[7])
  quarantine(wait > 0 and started + wait or 0)
  call('HSET', KEYS[1], 'o', '0', 'e', ARGV[3], 'b', string.format('%.0f', started),
    'i', string.format('%.0f', math.floor(started / 1000)), 'r', ARGV[1], 'g', '0',
    't', string.format('%.0f', started))
elseif m[8] and m[8] ~= ARGV[6] then
  unknown, why = false, 'moved'
  quarantine(math.max(tonumber(m[3]), started + window))
elseif ARGV[4] ~= '' and ARGV[4] ~= m[1] then
  unknown, why = false, 'lost'
  quarantine(math.max(tonumber(m[3]), math.min(tonumber(m[2]), started) + window))
elseif fresh and unknown and tonumber(m[3]) > started then
  quarantine(started)
  ended = true
end
if m[7] ~= ARGV[5] or m[8] ~= ARGV[6] then
  call('HSET', KEYS[1], 'w', ARGV[5], 'd', ARGV[6])
end
if call('HEXISTS', P .. 'nodes', '/default') == 0 then -- or else a full memory refuses the script
  call('HSET', P .. 'nodes', '/default', '{}')
end
--#head
--#body
--#rest
if not is_new and ARGV[1] ~= '' and m[4] ~= ARGV[1] then -- another server, or the same one started again
  whatever_memory()
  call('HSET', KEYS[1], 'r', ARGV[1])
  for _, id in ipairs(call('ZRANGE', P .. 'x', 0, -1)) do
    local session = P .. 's:' .. id
    local s = call('HMGET', session, 'l', 'n', 'u', 'y')
    if s[1] == 'window' and s[3] ~= s[4] then -- once, until it is renewed
      touch(id, grace_of(s[2]))
      call('HSET', session, 'y', call('HGET', session, 'u'))
    end
  end
end
local no_sessions = call('EXISTS', P .. 'x') == 0 -- then no request is anybody's
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
return {'ok', meta[1], quarantined and meta[3] - now or 0, why, unknown and 1 or 0}
