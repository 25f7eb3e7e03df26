-- What scripts that go beyond the usual case are made of.
--
-- A semaphore is a hash: l limit (an ephemeral one has none), o owners, h held (as far as it can be
-- exact, and is not the whole), w whole, n waiting, d data; each request is a field named by its order id, "session hold count joined granted
-- deadline" (0 for none), and its data, if any, in "D" .. order id. Who waits is in a sorted set.
-- A session is a hash: a token of its attachment, n node, u until, w window, l liveness, k key,
-- c channel, d description, t attached, f when its keys were last given time to live, y the end that it was
-- given when the server had been away; each hold is
-- a field: "order name", or "!kind order" when the request was taken out and it may not know.
local loaded, dirty = {}, {}

local function load(path, name)
  local key = path .. ':' .. name
  local found = loaded[key]
  if found == nil then
    local f = call('HMGET', P .. 'm:' .. key, 'l', 'h', 'o', 'w', 'n')
    found = false
    if f[3] then
      found = {
        path = path, name = name, key = P .. 'm:' .. key, waiters = P .. 'w:' .. key,
        limit = f[1] or WHOLE, lasting = f[1] and true, held = tonumber(f[2] or 0),
        owners = tonumber(f[3]), whole = f[4] == '1', waiting = tonumber(f[5] or 0),
      }
      found.exact = at_most(found.limit, EXACT)
    end
    loaded[key] = found
  end
  return found
end

local function parse(record)
  local id, hold, count, joined, granted, deadline =
    string.match(record, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  return {
    id = id, hold = hold, count = count, joined = joined, granted = granted, deadline = deadline,
  }
end

-- A request in a queue; nil if there is none, as after an eviction.
local function request_in(m, order)
  local record = m and call('HGET', m.key, order)
  return record and parse(record)
end

local function record_of(r)
  return table.concat({r.id, r.hold, r.count, r.joined, r.granted, r.deadline}, ' ')
end

local function amount(m, count) -- what a count adds to "held"
  return m.exact and count ~= m.limit and tonumber(count) or 0
end

local function tell(id, kind, rest)
  local s = call('HMGET', P .. 's:' .. id, 'c', 'a')
  if s[1] and s[1] ~= '' then
    call('PUBLISH', s[1], kind .. ' ' .. s[2] .. ' ' .. rest)
  end
end

local function due_member(order, r)
  return order .. ' ' .. r.id .. ' ' .. r.hold
end

-- Take a request out; nobody is granted before `settle`.
local function leave(m, order, r)
  call('HDEL', m.key, order, 'D' .. order)
  if r.granted ~= '0' then
    m.owners = m.owners - 1
    m.held = m.held - amount(m, r.count)
    m.whole = false
    m.changed = true
  else
    m.waiting = m.waiting - 1
    call('ZREM', m.waiters, order)
    if r.deadline ~= '0' then
      call('ZREM', P .. 'd', due_member(order, r))
    end
  end
  dirty[m] = true
end

-- Take a request out without its session asking for it, and leave word of it.
local function remove(m, order, r, kind)
  leave(m, order, r)
  if call('HEXISTS', P .. 's:' .. r.id, 'a') == 1 then
    call('HSET', P .. 's:' .. r.id, r.hold, '!' .. kind .. ' ' .. order)
    tell(r.id, kind, r.hold)
  end
end

local function grant_next(m)
  local order = call('ZRANGE', m.waiters, 0, 0)[1]
  local r = order and request_in(m, order)
  if not r then
    call('ZREM', m.waiters, order or '')
    m.waiting = call('ZCARD', m.waiters)
    return true
  elseif not fits(m.held, m.owners, m.whole, r.count, m.limit) then
    return false
  end
  call('ZREM', m.waiters, order)
  if r.deadline ~= '0' then
    call('ZREM', P .. 'd', due_member(order, r))
  end
  m.waiting = m.waiting - 1
  m.owners = m.owners + 1
  m.held = m.held + amount(m, r.count)
  m.whole = r.count == m.limit
  r.granted, r.deadline = int(now), '0'
  call('HSET', m.key, order, record_of(r))
  tell(r.id, 'g', r.hold .. ' ' .. order)
  m.changed = true
  return true
end

-- Grant what fits now in every queue that requests have left.
local function settle()
  for m in pairs(dirty) do
    while not quarantined and m.waiting > 0 and grant_next(m) do
    end
    if not m.lasting and m.owners == 0 and m.waiting == 0 then
      call('DEL', m.key, m.waiters)
      loaded[m.path .. ':' .. m.name] = false
      changed(m.path, m.name, 'b')
    else
      call('HSET', m.key, 'h', int(m.held), 'o', m.owners, 'w', m.whole and '1' or '0',
        'n', m.waiting)
      if m.changed then
        changed(m.path, m.name, 'o')
        m.changed = false
      end
    end
  end
  dirty = {}
end

-- End a session; with `why`, it is told so. Nobody is granted before `settle`.
local function end_session(id, why)
  local fields = call('HGETALL', P .. 's:' .. id)
  local s, holds = {}, {}
  for at = 1, #fields, 2 do
    if string.find(fields[at], '^%d') then
      holds[#holds + 1] = fields[at + 1]
    else
      s[fields[at]] = fields[at + 1]
    end
  end
  call('ZREM', P .. 'x', id)
  if not s.n then
    return false
  end
  for _, place in ipairs(holds) do
    local order, name = string.match(place, '^(%d+) (.*)$')
    if order then
      local m = load(s.n, name)
      local r = request_in(m, order)
      if r then
        leave(m, order, r)
      end
    end
  end
  if why and s.c ~= '' then
    call('PUBLISH', s.c, 'E ' .. s.a .. ' ' .. why)
  end
  call('DEL', P .. 's:' .. id)
  call('SREM', P .. 'S:' .. s.n, id)
  return true
end

-- End what has run out by now, the earliest first; whether there was anything.
local next_due -- when something runs out next, as far as `expire` has seen
local function expire()
  local any = false
  while true do
    local x = call('ZRANGE', P .. 'x', 0, 0, 'WITHSCORES')
    local d = call('ZRANGE', P .. 'd', 0, 0, 'WITHSCORES')
    local session, waiter = tonumber(x[2] or math.huge), tonumber(d[2] or math.huge)
    if session > now and waiter > now then
      next_due = math.min(session, waiter)
      return any
    end
    any = true
    if session <= waiter then
      end_session(x[1], 'nothing was heard of it for its window')
    else
      call('ZREM', P .. 'd', d[1])
      local order, id, hold = string.match(d[1], '^(%d+) (%d+) (%d+)$')
      local s = call('HMGET', P .. 's:' .. id, 'n', hold)
      local name = s[2] and string.match(s[2], '^%d+ (.*)$')
      if name then
        local m = load(s[1], name)
        local r = request_in(m, order)
        if r then
          remove(m, order, r, 't')
        end
      end
    end
    settle()
  end
end

-- Microseconds until something runs out, or the quarantine ends; -1 for never.
local function due()
  local first = next_due
  for _, key in ipairs(first and {} or {'x', 'd'}) do
    local found = call('ZRANGE', P .. key, 0, 0, 'WITHSCORES')
    first = math.min(first or math.huge, tonumber(found[2] or math.huge))
  end
  if quarantined then
    first = math.min(first, tonumber(meta[3]))
  end
  return first == math.huge and -1 or math.max(0, first - now)
end

-- What an attachment that is not the session's (any more) is told.
local function over(id)
  local s = call('HMGET', P .. 's:' .. id, 'a', 'u')
  if s[1] and tonumber(s[2]) > now then
    return {'taken'}
  end
  expire()
  return {'gone'}
end

local function is_current(id, token)
  local s = call('HMGET', P .. 's:' .. id, 'a', 'u')
  return s[1] == token and tonumber(s[2]) > now
end

-- Give a session its window from now on. What Redis keeps for it gets time to live, twice a day.
local function touch(id, grace)
  local key = P .. 's:' .. id
  local s = call('HMGET', key, 'w', 'f', 'n', 'u')
  local till = math.max(now + s[1] + (grace or 0), grace and tonumber(s[4]) or 0)
  call('HSET', key, 'u', int(till))
  call('ZADD', P .. 'x', int(till), id)
  if now - s[2] > 43200000000 then
    call('HSET', key, 'f', int(now))
    call('PEXPIRE', key, KEEP)
    for _, each in ipairs({'x', 'd', 'S:' .. s[3]}) do
      call('PEXPIRE', P .. each, KEEP)
    end
    local fields = call('HGETALL', key)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%d+ (.*)$')
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
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%d+ (.*)$')
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
local function requests_of(m)
  local found = {}
  local fields = call('HGETALL', m.key)
  local data = {}
  for at = 1, #fields, 2 do
    if string.sub(fields[at], 1, 1) == 'D' then
      data[string.sub(fields[at], 2)] = fields[at + 1]
    end
  end
  for at = 1, #fields, 2 do
    local order = fields[at]
    if string.find(order, '^%d') then
      local s = call('HMGET', P .. 's:' .. parse(fields[at + 1]).id, 'd', 'u')
      found[#found + 1] = {order, fields[at + 1], data[order] or '', s[1] or '', s[2] or '0'}
    end
  end
  return found
end

local function describe(m, wanted)
  local data = call('HGET', m.key, 'd') or ''
  local requests = (wanted or not m.exact) and requests_of(m) or {}
  local held = m.whole and m.limit or int(m.held)
  return {m.name, data, m.limit, m.lasting and 1 or 0, held, m.waiting, int(now), requests}
end
