-- Semaphores and their queues.
--
-- A semaphore is a hash: l limit (an ephemeral one has none), o owners, h held (0 if it cannot be
-- exact, or is the whole), w whole, n waiting, d data; each request is a field named by its order
-- id, "session request count joined granted deadline" (0 for none), and its data, if any, in "D" ..
-- order id. Waiters are in a sorted set. A mutex without waiters so far is a string instead, its short
-- form: "session request order joined", and behind them the data, if any.
-- A session is a hash: a token of its attachment, n node, u until, w window, l liveness, k key,
-- c channel, d description, t attached, f when its keys were last given time to live, y the end that it was
-- given when the server had been away; each request is a field, its *place*: "order name", with a "+" before it while
-- that is in its short form, or "!kind order" when the request was taken out and it may not know: t timed
-- out, x deleted, e evicted, r with the new limit of its semaphore.
--#include parts/namespace.lua
local PLACE = '^%+?(%d+) (.*)$'
local EXACT = '9007199254740991'
local loaded, dirty = {}, {} -- semaphores as they are now; those that requests have left
local caller, pushes = nil, {} -- the session whose answer can have its pushes; these

-- A Redis whose memory is full refuses the first write of a script if that takes memory, and nothing
-- behind a write that takes none. So sessions are renewed, and expired ones end.
local function whatever_memory()
  call('DEL', P .. 'none')
end

local function int(number)
  return string.format('%.0f', number)
end

local function changed(path, name, what)
  if watched then
    call('PUBLISH', P .. 'c:' .. epoch .. ':' .. path .. ':' .. name, what)
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
  local id, request_id, order, joined, data =
    string.match(call('GET', found.key), '^(%d+) (%d+) (%d+) (%d+) ?(.*)$')
  found.owners, found.whole = 1, true
  found.short = {order = order, id = id, request_id = request_id, data = data}
  found.record = {
    [order] = id .. ' ' .. request_id .. ' ' .. WHOLE .. ' ' .. joined .. ' ' .. joined .. ' 0',
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
      local owners, limit, held, whole, waiting, record = unpack(f)
      if owners then
        found.limit, found.lasting, found.held = limit or WHOLE, limit and true, tonumber(held or 0)
        found.owners, found.whole, found.waiting = tonumber(owners), whole == '1', tonumber(waiting or 0)
        if order then
          found.record[order] = record
        end
      else
        found = false
      end
    end
    if found then
      found.exact = at_most(found.limit, EXACT)
      if found.exact and found.whole then
        found.held = tonumber(found.limit)
      end
    end
    loaded[at] = found
  end
  return found
end

local function parse(record)
  local id, request_id, count, joined, granted, deadline =
    string.match(record, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  return {
    id = id, request_id = request_id, count = count, joined = joined, granted = granted, deadline = deadline,
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
  return table.concat({r.id, r.request_id, r.count, r.joined, r.granted, r.deadline}, ' ')
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
      call('HSET', P .. 's:' .. short.id, short.request_id, place)
    end
    if caller and caller.id == short.id then
      caller.places[short.request_id] = place
    end
    m.short = nil
  end
end

local function amount(m, count) -- what a count adds to "held"
  return m.exact and tonumber(count) or 0
end

local function held_text(m)
  return m.whole and '0' or int(m.held)
end

local function push(id, kind, rest)
  local channel, token = caller and caller.channel, caller and caller.token
  if not caller or id ~= caller.id then
    channel, token = unpack(call('HMGET', P .. 's:' .. id, 'c', 'a'))
  end
  if channel and channel ~= '' then
    local text = kind .. ' ' .. token .. ' ' .. rest
    if caller and channel == caller.channel then
      pushes[#pushes + 1] = text
    else
      call('PUBLISH', channel, text)
    end
  end
end

local function due_member(order, r)
  return order .. ' ' .. r.id .. ' ' .. r.request_id
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
    call('HSET', P .. 's:' .. r.id, r.request_id, '!' .. kind .. ' ' .. order)
    push(r.id, kind, r.request_id)
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
  push(r.id, 'g', r.request_id .. ' ' .. order)
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
        write(m, 'h', held_text(m))
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
