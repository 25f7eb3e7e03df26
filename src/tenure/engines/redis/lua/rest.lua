-- What the scripts that go beyond `operate` need besides.
local function is_current(id, token)
  local s = call('HMGET', P .. 's:' .. id, 'a', 'u')
  return s[1] == token and s[2] and tonumber(s[2]) > now
end

local function data_of(m, order)
  if m.short then
    return m.short.data
  end
  return call('HGET', m.key, 'D' .. order) or ''
end

-- A Redis whose memory is full refuses the first write of a script if that takes memory, and nothing
-- behind a write that takes none. So sessions are renewed, and expired ones end.
local function whatever_memory()
  call('DEL', P .. 'none')
end

-- Have changes published for a minute; what time it is, and until when that is.
local function be_watched()
  local till = now + 60000000
  call('HSET', KEYS[1], 'v', int(till), 'p', int(math.max(till, meta[3])))
  return {now, till}
end

local function note_time()
  if not meta[5] or now > tonumber(meta[5]) then
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
  local s = call('HMGET', key, 'w', 'f', 'n', 'u')
  local till = math.max(now + s[1] + (grace or 0), grace and tonumber(s[4]) or 0)
  call('HSET', key, 'u', int(till))
  call('ZADD', P .. 'x', int(till), id)
  call('SADD', P .. 'S:' .. s[3], id) -- as these two, it may have been deleted
  call('HSETNX', P .. 'nodes', s[3], '{}')
  if now - s[2] > 43200000000 then
    call('HSET', key, 'f', instant)
    call('PEXPIRE', key, KEEP)
    for _, each in ipairs({'x', 'd', 'S:' .. s[3]}) do
      call('PEXPIRE', P .. each, KEEP)
    end
    local fields = call('HGETALL', key)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      local m = name and load(s[3], name)
      if m then
        call('PEXPIRE', m.waiters, KEEP)
        if not m.lasting then
          call('PEXPIRE', m.key, KEEP)
        end
      end
    end
  end
end

-- The names of the ephemeral semaphores of a node: those that its sessions use.
local function ephemeral_names(path)
  local known, names = {}, {}
  for _, id in ipairs(call('SMEMBERS', P .. 'S:' .. path)) do
    local fields = call('HGETALL', P .. 's:' .. id)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      if name and not known[name] then
        known[name] = true
        local m = load(path, name)
        if m and not m.lasting then
          names[#names + 1] = name
        end
      end
    end
  end
  return names
end

-- Everything in a semaphore's queue: {order, record, data, session's description, its end} each.
-- With `owners`, of the owners alone: the cost of a session's description is not paid for waiters.
local function requests_of(m, owners)
  local records, data = m.record, {}
  if m.short then
    data[m.short.order] = m.short.data
  else
    local fields = call('HGETALL', m.key)
    records = {}
    for at = 1, #fields, 2 do
      if string.find(fields[at], '^%d') then
        records[fields[at]] = fields[at + 1]
      elseif string.sub(fields[at], 1, 1) == 'D' then
        data[string.sub(fields[at], 2)] = fields[at + 1]
      end
    end
  end
  local found = {}
  for order, record in pairs(records) do
    local r = parse(record)
    if not owners or r.granted ~= '0' then
      local s = call('HMGET', P .. 's:' .. r.id, 'd', 'u')
      found[#found + 1] = {order, record, data[order] or '', s[1] or '', s[2] or '0'}
    end
  end
  return found
end

-- `wanted`: 'all' requests, 'owners', or none.
local function describe(m, wanted)
  local data = not m.short and call('HGET', m.key, 'd') or ''
  local requests = (wanted ~= 'none' or not m.exact) and requests_of(m, wanted ~= 'all') or {}
  local held = m.whole and m.limit or int(m.held)
  return {m.name, data, m.limit, m.lasting and 1 or 0, held, m.waiting, instant, requests}
end

-- The clock was set back. Every time that is stored lies ahead by its own duration at the most: what
-- was to end soon may end later, by no more than that, and nothing ends sooner.
local function bound_times()
  whatever_memory()
  local longest = tonumber(call('HGET', KEYS[1], 'w') or '1800000000')
  meta[3] = int(math.min(tonumber(meta[3]), now + longest))
  meta[4] = int(math.min(tonumber(meta[4] or 0), now + 60000000))
  quarantined, watched = tonumber(meta[3]) > now, tonumber(meta[4]) > now
  local p = int(math.max(tonumber(meta[3]), tonumber(meta[4])))
  call('HSET', KEYS[1], 'q', meta[3], 'v', meta[4], 'p', p, 't', instant)
  for _, id in ipairs(call('ZRANGE', P .. 'x', 0, -1)) do
    local key = P .. 's:' .. id
    local s = call('HMGET', key, 'w', 'u', 'y', 'n')
    if s[2] then
      local latest = now + s[1]
      local till = latest + (s[2] == s[3] and grace_of(s[4]) or 0)
      if tonumber(s[2]) > till then
        call('HSET', key, 'u', int(till))
        call('ZADD', P .. 'x', int(till), id)
        if s[2] == s[3] then
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
    local order, id, hold = string.match(member, '^(%d+) (%d+) (%d+)$')
    local s = call('HMGET', P .. 's:' .. id, 'n', hold)
    local name = s[2] and string.match(s[2], '^%d+ (.*)$')
    local m = name and load(s[1], name, s[2])
    local r = request_in(m, order)
    if r and tonumber(r.joined) > now then
      r.deadline, r.joined = int(now + math.max(0, r.deadline - r.joined)), instant
      m.record[order] = record_of(r)
      call('HSET', m.key, order, m.record[order])
      call('ZADD', P .. 'd', r.deadline, member)
    end
  end
end
if set_back then
  bound_times()
end
