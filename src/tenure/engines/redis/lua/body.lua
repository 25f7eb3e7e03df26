-- What scripts that go beyond the usual case are made of.
--
-- A semaphore is a hash: l limit (an ephemeral one has none), o owners, h held (as far as it can be
-- exact, and is not the whole), w whole, n waiting, d data; each request is a field named by its order
-- id, "session hold count joined granted deadline" (0 for none), and its data, if any, in "D" .. order
-- id. Waiters are in a sorted set. A mutex without waiters so far is a string instead, its short
-- form: "session hold order joined", and behind them the data, if any.
-- A session is a hash: a token of its attachment, n node, u until, w window, l liveness, k key,
-- c channel, d description, t attached, f when its keys were last given time to live, y the end that it was
-- given when the server had been away; each hold is a field: "order name", with a "+" before it while
-- that is in its short form, or "!kind order" when the request was taken out and it may not know.
local PLACE = '^%+?(%d+) (.*)$'
local EXACT = '9007199254740991'
local loaded, dirty = {}, {} -- semaphores as they are now; those that requests have left
local asker, news = nil, {} -- the session that asks, where its answer can tell it more; that

local function int(number)
  return string.format('%.0f', number)
end

local function changed(path, name, what)
  if watched then
    call('PUBLISH', P .. 'c:' .. meta[1] .. ':' .. path .. ':' .. name, what)
  end
end

local function at_most(one, other)
  return #one < #other or (#one == #other and one <= other)
end

local function fits(held, owners, whole, count, limit)
  if whole then
    return false
  elseif count == limit then
    return owners == 0
  end
  return not at_most(limit, EXACT) or held + count <= tonumber(limit)
end

-- A semaphore in its short form.
local function load_short(found)
  local id, hold, order, joined, data =
    string.match(call('GET', found.key), '^(%d+) (%d+) (%d+) (%d+) ?(.*)$')
  found.owners, found.whole = 1, true
  found.short = {order = order, id = id, hold = hold, data = data}
  found.record = {
    [order] = id .. ' ' .. hold .. ' ' .. WHOLE .. ' ' .. joined .. ' ' .. joined .. ' 0',
  }
end

-- A semaphore, or false if it does not exist. A place may say that it is in its long form: then
-- the record of the request there is read with it.
local function load(path, name, place)
  local at = path .. ':' .. name
  local found = loaded[at]
  if found == nil then
    local key = P .. 'm:' .. at
    found = { -- with room for everything
      path = path, name = name, key = key, waiters = P .. 'w:' .. at, record = {}, put = {}, held = 0,
      limit = WHOLE, lasting = false, owners = 0, whole = false, waiting = 0, exact = false,
      changed = false, short = nil,
    }
    local order = place and string.match(place, '^%d+')
    local f = (order or call('TYPE', key).ok ~= 'string')
      and redis.pcall('HMGET', key, 'o', 'l', 'h', 'w', 'n', order or 'o')
    if not f or f.err then -- by its place it is long only where keys were lost
      load_short(found)
    else
      if f[1] then
        found.limit, found.lasting, found.held = f[2] or WHOLE, f[2] and true, tonumber(f[3] or 0)
        found.owners, found.whole, found.waiting = tonumber(f[1]), f[4] == '1', tonumber(f[5] or 0)
        if order then
          found.record[order] = f[6]
        end
      else
        found = false
      end
    end
    if found then
      found.exact = at_most(found.limit, EXACT)
    end
    loaded[at] = found
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
  local record = m and m.record[order]
  if m and record == nil and not m.short then
    record = call('HGET', m.key, order)
  end
  return record and parse(record)
end

local function record_of(r)
  return table.concat({r.id, r.hold, r.count, r.joined, r.granted, r.deadline}, ' ')
end

-- Give a semaphore its long form, before anything of it changes.
local function lengthen(m)
  local short = m.short
  if short then
    call('DEL', m.key)
    call('HSET', m.key, 'o', '1', 'w', '1', short.order, m.record[short.order])
    if short.data ~= '' then
      call('HSET', m.key, 'D' .. short.order, short.data)
    end
    call('PEXPIRE', m.key, KEEP)
    local place = short.order .. ' ' .. m.name
    if call('HEXISTS', P .. 's:' .. short.id, 'a') == 1 then
      call('HSET', P .. 's:' .. short.id, short.hold, place)
    end
    if asker and asker.id == short.id then
      asker.places[short.hold] = place
    end
    m.short = nil
  end
end

local function amount(m, count) -- what a count adds to "held"
  return m.exact and count ~= m.limit and tonumber(count) or 0
end

local function tell(id, kind, rest)
  local channel, token = asker and asker.channel, asker and asker.token
  if not asker or id ~= asker.id then
    channel, token = unpack(call('HMGET', P .. 's:' .. id, 'c', 'a'))
  end
  if channel and channel ~= '' then
    local text = kind .. ' ' .. token .. ' ' .. rest
    if asker and channel == asker.channel then
      news[#news + 1] = text
    else
      call('PUBLISH', channel, text)
    end
  end
end

local function due_member(order, r)
  return order .. ' ' .. r.id .. ' ' .. r.hold
end

-- Have fields of a semaphore written by `settle`.
local function write(m, field, value)
  local put = m.put
  put[#put + 1] = field
  put[#put + 1] = value
  if #put > 1000 then -- what Lua can unpack is limited
    call('HSET', m.key, unpack(put))
    m.put = {}
  end
end

local function write_record(m, order, r)
  m.record[order] = record_of(r)
  write(m, order, m.record[order])
end

-- Take a request out; nothing is granted before `settle`.
local function leave(m, order, r)
  if m.short then
    call('DEL', m.key)
    m.short = nil
  else
    call('HDEL', m.key, order, 'D' .. order)
  end
  m.record[order] = false
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
  local order
  if m.owners == 0 then -- whatever it wants, it fits
    order = call('ZPOPMIN', m.waiters)[1]
  else
    order = call('ZRANGE', m.waiters, '0', '0')[1]
  end
  local r = order and request_in(m, order)
  if not r then
    call('ZREM', m.waiters, order or '')
    m.waiting = call('ZCARD', m.waiters)
    return true
  elseif m.owners > 0 then
    if not fits(m.held, m.owners, m.whole, r.count, m.limit) then
      return false
    end
    call('ZREM', m.waiters, order)
  end
  if r.deadline ~= '0' then
    call('ZREM', P .. 'd', due_member(order, r))
  end
  m.waiting = m.waiting - 1
  m.owners = m.owners + 1
  m.held = m.held + amount(m, r.count)
  m.whole = r.count == m.limit
  r.granted, r.deadline = instant, '0'
  write_record(m, order, r)
  tell(r.id, 'g', r.hold .. ' ' .. order)
  m.changed = true
  return true
end

-- Grant what fits now in every queue that requests have left.
local function settle()
  for m in pairs(dirty) do
    while not (quarantined or m.whole) and m.waiting > 0 and grant_next(m) do
    end
    if not m.lasting and m.owners == 0 and m.waiting == 0 then
      call('DEL', m.key, m.waiters)
      loaded[m.path .. ':' .. m.name] = false
      changed(m.path, m.name, 'b')
    else
      if m.exact then
        write(m, 'h', int(m.held))
      end
      call('HSET', m.key, 'o', m.owners, 'w', m.whole and '1' or '0', 'n', m.waiting, unpack(m.put))
      m.put = {}
      if m.changed then
        changed(m.path, m.name, 'o')
        m.changed = false
      end
    end
  end
  dirty = {}
end

-- End a session; with `why`, it is notified. Nothing is granted before `settle`.
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
    local order, name = string.match(place, PLACE)
    if order then
      local m = load(s.n, name, place)
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

-- End what has run out by now, the earliest first; whether there was anything. Once a script, whose
-- time stands still.
local expired = false
local next_due -- when something runs out next, as far as `expire` has seen
local function expire()
  local any = false
  if expired then
    return any
  end
  expired = true
  while true do
    local x = call('ZRANGE', P .. 'x', '0', '0', 'WITHSCORES')
    local d = call('ZRANGE', P .. 'd', '0', '0', 'WITHSCORES')
    local session, waiter = tonumber(x[2] or math.huge), tonumber(d[2] or math.huge)
    if session > now and waiter > now then
      next_due = math.min(session, waiter)
      return any
    end
    any = true
    if session <= waiter then
      end_session(x[1], 'it was not renewed for its recovery window')
    else
      call('ZREM', P .. 'd', d[1])
      local order, id, hold = string.match(d[1], '^(%d+) (%d+) (%d+)$')
      local s = call('HMGET', P .. 's:' .. id, 'n', hold)
      local name = s[2] and string.match(s[2], '^%d+ (.*)$')
      if name then
        local m = load(s[1], name, s[2])
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
    local found = call('ZRANGE', P .. key, '0', '0', 'WITHSCORES')
    first = math.min(first or math.huge, tonumber(found[2] or math.huge))
  end
  if quarantined then
    first = math.min(first, tonumber(meta[3]))
  end
  return first == math.huge and -1 or math.max(0, first - now)
end

-- A substitute session, for what former holders whose records were deleted may consider held. It
-- ends when all have noticed: after the longest recovery window.
local function substitute(path)
  local id = int(call('HINCRBY', KEYS[1], 'i', 1))
  local window = call('HGET', KEYS[1], 'w') or '1800000000'
  local till = int(now + window)
  call('HSET', P .. 's:' .. id, 'a', '0.' .. id, 'n', path, 'w', window, 'l', 'process', 'k', '',
    'd', 'a holder whose records were deleted', 'c', '', 't', '0', 'f', instant, 'u', till)
  call('PEXPIRE', P .. 's:' .. id, KEEP)
  call('SADD', P .. 'S:' .. path, id)
  call('ZADD', P .. 'x', till, id)
  return id
end

-- Have a queue show what it may still grant, if keys or fields of it, or of its owners' sessions, were
-- deleted.
local function mend(m)
  local records = m.record
  if not m.short then
    records = {}
    local fields = call('HGETALL', m.key)
    for at = 1, #fields, 2 do
      if string.find(fields[at], '^%d') then
        records[fields[at]] = fields[at + 1]
      end
    end
  end
  local owners, held, whole, first, other = 0, 0, false, math.huge, nil
  local waiting, lost = {}, {}
  for order, record in pairs(records) do
    local r = parse(record)
    first = math.min(first, tonumber(order))
    if r.granted == '0' then
      waiting[#waiting + 1] = order
    else
      owners = owners + 1
      held = held + amount(m, r.count)
      whole = whole or r.count == m.limit
      local s = call('HMGET', P .. 's:' .. r.id, r.hold, 'u')
      if not s[1] or string.match(s[1], '^%+?(%d+) ') ~= order then
        lost[#lost + 1] = order
      elseif not call('ZSCORE', P .. 'x', r.id) then
        call('DEL', P .. 'none') -- see whatever_memory
        call('ZADD', P .. 'x', s[2], r.id)
      end
    end
  end
  if #lost == 0 and owners >= m.owners and #waiting == call('ZCARD', m.waiters) then
    return false
  end
  call('DEL', P .. 'none') -- see whatever_memory
  lengthen(m)
  for _, order in ipairs(lost) do
    other = other or substitute(m.path)
    local r = parse(records[order])
    r.id, r.hold = other, order
    write_record(m, order, r)
    call('HSET', P .. 's:' .. other, order, order .. ' ' .. m.name)
  end
  if owners < m.owners then
    other = other or substitute(m.path)
    local order = int(math.min(first, now) - 1)
    local count = m.whole and m.limit or int(math.max(1, m.held - held))
    write_record(m, order, {
      id = other, hold = order, count = count, joined = instant, granted = instant, deadline = '0',
    })
    call('HSET', P .. 's:' .. other, order, order .. ' ' .. m.name)
    owners, held, whole = owners + 1, held + amount(m, count), m.whole
  end
  for _, order in ipairs(waiting) do
    call('ZADD', m.waiters, order, order)
  end
  m.owners, m.held, m.whole, m.waiting = owners, held, whole, #waiting
  dirty[m] = true
  settle()
  return true
end

-- The answer to an attachment that is not the session's (any more).
local function over(id)
  local s = call('HMGET', P .. 's:' .. id, 'a', 'u')
  if s[1] and s[2] and tonumber(s[2]) > now then
    return {'taken'}
  end
  expire()
  return {'gone'}
end
