-- Sessions and their windows, and the clock that they depend on.
--#include parts/expiry.lua
local function is_current(id, token)
  local current, till = unpack(call('HMGET', P .. 's:' .. id, 'a', 'u'))
  return current == token and till and tonumber(till) > now
end

-- Have changes published for a minute; what time it is, and until when that is.
local function be_watched()
  local till = now + 60000000
  call('HSET', KEYS[1], 'v', int(till), 'p', int(math.max(till, quarantine_end)))
  return {now, till}
end

-- The latest time that was noted here.
local noted = call('HGET', KEYS[1], 't')
local function note_time()
  if not noted or now > tonumber(noted) then
    call('HSET', KEYS[1], 't', instant)
  end
end

-- Microseconds that the sessions of a node get besides their windows when the server was away.
local function grace_of(path)
  local node = call('HGET', P .. 'nodes', path)
  local grace = node and cjson.decode(node).session_grace_period or 0
  return (grace > 0 and grace or 10) * 1000000
end

-- Give a session its window from now on. What Redis keeps for it gets time to live, twice a day.
local function touch(id, grace)
  whatever_memory()
  note_time()
  local key = P .. 's:' .. id
  local window, kept_at, path, before = unpack(call('HMGET', key, 'w', 'f', 'n', 'u'))
  local till = math.max(now + window + (grace or 0), grace and tonumber(before) or 0)
  call('HSET', key, 'u', int(till))
  call('ZADD', P .. 'x', int(till), id)
  call('SADD', P .. 'S:' .. path, id) -- as these two, it may have been deleted
  call('HSETNX', P .. 'nodes', path, '{}')
  if now - kept_at > 43200000000 then
    call('HSET', key, 'f', instant)
    call('PEXPIRE', key, KEEP)
    for _, each in ipairs({'x', 'd', 'S:' .. path}) do
      call('PEXPIRE', P .. each, KEEP)
    end
    local fields = call('HGETALL', key)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      local m = name and load(path, name)
      if m then
        call('PEXPIRE', m.waiters, KEEP)
        if not m.lasting then
          call('PEXPIRE', m.key, KEEP)
        end
      end
    end
  end
end

-- The clock was set back. Every time that is stored lies ahead by its own duration at the most: what
-- was to end soon may end later, by no more than that, and nothing ends sooner.
local function bound_times()
  whatever_memory()
  local longest = tonumber(call('HGET', KEYS[1], 'w') or '1800000000')
  quarantine_end = int(math.min(tonumber(quarantine_end), now + longest))
  published_end = int(math.min(tonumber(published_end or 0), now + 60000000))
  quarantined, watched = tonumber(quarantine_end) > now, tonumber(published_end) > now
  local p = int(math.max(tonumber(quarantine_end), tonumber(published_end)))
  call('HSET', KEYS[1], 'q', quarantine_end, 'v', published_end, 'p', p, 't', instant)
  for _, id in ipairs(call('ZRANGE', P .. 'x', 0, -1)) do
    local key = P .. 's:' .. id
    local window, before, with_grace, path = unpack(call('HMGET', key, 'w', 'u', 'y', 'n'))
    if before then
      local latest = now + window
      local till = latest + (before == with_grace and grace_of(path) or 0)
      if tonumber(before) > till then
        call('HSET', key, 'u', int(till))
        call('ZADD', P .. 'x', int(till), id)
        if before == with_grace then
          call('HSET', key, 'y', int(till))
        end
      end
      local fields = call('HGETALL', key)
      for at = 1, #fields, 2 do
        if string.sub(fields[at], 1, 1) == 'B' and tonumber(fields[at + 1]) > latest then
          call('HSET', key, fields[at], int(latest))
        end
      end
    end
  end
  for _, member in ipairs(call('ZRANGE', P .. 'd', 0, -1)) do
    local order, id, request_id = string.match(member, '^(%d+) (%d+) (%d+)$')
    local path, place = unpack(call('HMGET', P .. 's:' .. id, 'n', request_id))
    local name = place and string.match(place, '^%d+ (.*)$')
    local m = name and load(path, name, place)
    local r = request_in(m, order)
    if r and tonumber(r.joined) > now then
      r.deadline, r.joined = int(now + math.max(0, r.deadline - r.joined)), instant
      m.record[order] = record_of(r)
      call('HSET', m.key, order, m.record[order])
      call('ZADD', P .. 'd', r.deadline, member)
    end
  end
end
if noted and now + 1000000 < tonumber(noted) then
  bound_times()
end
