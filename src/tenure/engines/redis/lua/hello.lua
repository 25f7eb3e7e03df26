-- ARGV: this Redis's run id, fresh, an id for a new epoch, the epoch that the client knows ("" for
-- none), the quarantine of lost data in microseconds.
-- Answers {epoch, whether it is new, quarantine that is left, whether "fresh" would end that}.
--
-- A namespace without its epoch is new, or has lost its data. Holders may believe yet in leases
-- that are forgotten here, so nothing is granted until their windows are over, unless it is known
-- to be new. That can be said later, too, as long as no client has come that knew another epoch
-- ("n": nobody has).
local call = redis.call
local P = string.sub(KEYS[1], 1, -5)
local clock = call('TIME')
local started = clock[1] * 1000000 + clock[2]
local m = call('HMGET', KEYS[1], 'e', 'b', 'q', 'g', 'r', 'n', 'v')
local window = math.max(tonumber(ARGV[5]), tonumber(m[4] or 0))
local is_new = not m[1]
local fresh = ARGV[2] == '1' and ARGV[4] == ''
local unknown, ended = m[6] == '1', false
local function quarantine(till) -- until then, and more than the usual case as long as somebody watches
  local q, p = string.format('%.0f', till), string.format('%.0f', math.max(till, m[7] or 0))
  call('HSET', KEYS[1], 'p', p, 'q', q, 'n', unknown and '1' or '0')
end
if is_new then
  unknown = ARGV[4] == ''
  quarantine(fresh and 0 or started + window)
  call('HSET', KEYS[1], 'o', '0', 'e', ARGV[3], 'b', string.format('%.0f', started),
    'i', string.format('%.0f', math.floor(started / 1000)), 'r', ARGV[1], 'g', '0')
  call('HSETNX', P .. 'nodes', '/default', '{}')
elseif ARGV[4] ~= '' and ARGV[4] ~= m[1] then
  unknown = false
  quarantine(math.max(tonumber(m[3]), m[2] + window))
elseif fresh and unknown and tonumber(m[3]) > started then
  quarantine(started)
  ended = true
end
--#head
--#body
--#rest
if not is_new and m[5] ~= ARGV[1] then -- another server, or the same one started again
  whatever_memory()
  call('HSET', KEYS[1], 'r', ARGV[1])
  for _, id in ipairs(call('ZRANGE', P .. 'x', 0, -1)) do
    local session = P .. 's:' .. id
    local s = call('HMGET', session, 'l', 'n', 'u', 'y')
    if s[1] == 'window' and s[3] ~= s[4] then -- once, until it is renewed
      local node = call('HGET', P .. 'nodes', s[2])
      local grace = node and cjson.decode(node).session_grace_period or 0
      touch(id, (grace > 0 and grace or 10) * 1000000)
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
return {meta[1], is_new and 1 or 0, quarantined and meta[3] - now or 0, unknown and 1 or 0}
