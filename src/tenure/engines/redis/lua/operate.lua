-- Frequent operations: those that a session called for together, in order.
-- ARGV: session, token, the highest order id that the client has seen; then for each operation
--   m, hold, name: a mutex, for ever
--   e, hold, name, count ("0" for none that could be right), data, timeout in microseconds ("" for
--     none), ephemeral
--   E, as e: sent before, and its answer was never seen
--   w, hold: out of its queue, if it is there
-- Answers a list. For each operation: an order id if granted, {order id, due} if it waits, 0 if refused
-- or withdrawn, -1 if there was nothing to withdraw, {what is wrong, ...}; behind them, what would have been published to the caller. A lone
-- number is not put in a list.
local call, ARGV = redis.call, ARGV
local P = string.sub(KEYS[1], 1, -5)
local WHOLE, KEEP = '18446744073709551615', '172800000' -- as in `head`
local SMALL = 1024 -- bytes of data that are kept with a mutex in its short form
local id, token, last = ARGV[1], ARGV[2], #ARGV
local session = P .. 's:' .. id

-- The clock is read, and what it bears on looked up, where that matters: to mere releases it does not.
local meta, instant, now, quarantined, watched
local function look_around()
  local clock = call('TIME')
  instant = #clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6)
  instant = clock[1] .. instant
  now = instant + 0
  if meta[2] > instant then
    meta = call('HMGET', KEYS[1], 'e', 'o', 'q', 'v')
    quarantined = meta[3] > instant
    watched = meta[4] and meta[4] > instant
  end
end

local s, fields, asks, at
if last == 6 then -- one "m"
  s, asks = call('HMGET', session, 'a', 'u', 'n'), true
elseif last == 5 then -- one "w"
  s = call('HMGET', session, 'a', 'u', 'n', ARGV[5])
else
  fields, at = {'a', 'u', 'n', 'c'}, 4
  while at <= last do
    local kind = ARGV[at]
    if kind == 'm' then
      asks = true
      at = at + 3
    else
      if kind ~= 'e' then
        fields[#fields + 1] = ARGV[at + 1]
      end
      asks = asks or kind ~= 'w'
      at = at + (kind == 'w' and 2 or 7)
    end
  end
  s = call('HMGET', session, unpack(fields))
end
meta = call('HMGET', KEYS[1], 'o', 'p')
if not meta[1] then
  return {'lost'}
end
local order = asks and math.max(meta[1], ARGV[3]) -- the last one
local newest -- that is given here, as text
if asks or meta[2] ~= '0' then
  look_around()
end
local alive = s[1] == token and (not now or s[2] > instant)
local path = s[3]
local prefix = alive and P .. 'm:' .. path .. ':'
local known -- what is known of semaphores, once there is more than the usual case
--#alone
local places = {}
if not fields then
  places[ARGV[5]] = s[4] or nil
else
  for each = 5, #fields do
    places[fields[each]] = s[each] or nil
  end
end
local answers, put, gone = {}, {}, {} -- what the session's holds become
at = 4
if alive then
--#usual
end
if at > last then
--#save
  return #answers == 1 and answers[1] or answers
end
if not now then
  look_around()
end

-- A function of its own: in Lua those below are made faster where what they use is not of the same one.
local function beyond()
--#body
if s[1] ~= token or s[2] <= instant then
  return over(id)
end
local channel = fields and s[4] or call('HGET', session, 'c')
asker = {id = id, token = token, channel = channel, places = places}
known = loaded

-- What is wrong with a request, if anything is; and whether it could be granted at once.
local function judge(m, count, ephemeral)
  local limit = m and m.limit or WHOLE
  if not m and not ephemeral then
    return {'missing'}
  elseif m and ephemeral == (m.lasting and true or false) then
    return {'kind', ephemeral and 0 or 1}
  elseif count == '0' or not at_most(count, limit)
      or (count ~= limit and not at_most(count, EXACT)) then
    return {'count', limit}
  end
  return nil, not quarantined
    and (not m or m.waiting == 0 and fits(m.held, m.owners, m.whole, count, limit))
end

-- Put a request at the end of its queue; its order id.
local function join(m, hold, name, count, data, granted, deadline)
  order = math.max(order + 1, now)
  local number = int(order)
  newest = number
  local r = {
    id = id, hold = hold, count = count, joined = instant, granted = granted and instant or '0',
    deadline = deadline or '0',
  }
  local key = P .. 'm:' .. path .. ':' .. name
  local record = record_of(r)
  if not m then
    local owners, waiting = granted and '1' or '0', granted and '0' or '1'
    local whole = granted and count == WHOLE and '1' or '0'
    call('HSET', key, 'o', owners, 'w', whole, 'n', waiting, number, record)
    call('PEXPIRE', key, KEEP)
    loaded[path .. ':' .. name] = nil
  else
    lengthen(m)
    m.record[number] = record
    if not m.lasting then -- no session that lives long need ever have been in this queue
      call('PEXPIRE', key, KEEP)
    end
    if not granted then
      m.waiting = m.waiting + 1
      call('HSET', key, 'n', m.waiting, number, record)
    else
      m.owners, m.whole, m.held = m.owners + 1, count == m.limit, m.held + amount(m, count)
      call('HSET', key, 'o', m.owners, 'w', m.whole and '1' or '0', 'h', int(m.held), number, record)
    end
  end
  if data ~= '' then
    call('HSET', key, 'D' .. number, data)
  end
  if not granted then
    local waiters = P .. 'w:' .. path .. ':' .. name
    call('ZADD', waiters, number, number)
    call('PEXPIRE', waiters, KEEP)
    if deadline then
      call('ZADD', P .. 'd', deadline, due_member(number, r))
      call('PEXPIRE', P .. 'd', KEEP)
      next_due = math.min(next_due, tonumber(deadline))
    end
  end
  places[hold] = number .. ' ' .. name
  put[#put + 1] = hold
  put[#put + 1] = places[hold]
  return order
end

local function enqueue(hold, name, count, data, timeout, ephemeral)
  local m = load(path, name)
  local wrong, grantable = judge(m, count, ephemeral)
  if not wrong and not grantable and expire() then
    m = load(path, name)
    wrong, grantable = judge(m, count, ephemeral)
  end
  if not wrong and not grantable and timeout == '0' and not quarantined and m and m.waiting < 100 then
    mend(m) -- a request that waits sees to that later
  end
  if wrong then
    return wrong
  elseif grantable then
    local number = join(m, hold, name, count, data, true)
    changed(path, name, m and 'o' or 'b')
    return number
  elseif timeout == '0' then
    return quarantined and {'quarantined', meta[3] - now} or 0
  end
  local deadline = timeout ~= '' and int(now + timeout)
  return {join(m, hold, name, count, data, false, deadline), due()}
end

-- What a request that was sent before has come to.
local function found(place)
  local order, name = string.match(place, PLACE)
  if not order then
    return {tonumber(string.match(place, '(%d+)$')), due()}
  end
  local r = request_in(load(path, name, place), order)
  if not r then
    return {'gone'} -- not without the queue being lost
  elseif r.granted ~= '0' then
    return tonumber(order)
  end
  return {tonumber(order), due()}
end

local function withdraw(hold, place)
  local order, name = string.match(place, PLACE)
  places[hold] = nil
  gone[#gone + 1] = hold
  if order then
    expire()
    local m = load(path, name, place)
    local r = request_in(m, order)
    if r then
      leave(m, order, r)
      settle()
      return 0
    end
  end
  return -1
end

local function act()
  local kind, hold = ARGV[at], ARGV[at + 1]
  if kind == 'w' then
    return withdraw(hold, places[hold])
  elseif kind == 'm' then
    return enqueue(hold, ARGV[at + 2], WHOLE, '', '', true)
  elseif kind == 'E' and places[hold] then
    return found(places[hold])
  end
  local name, count, data, timeout, ephemeral = unpack(ARGV, at + 2, at + 6)
  return enqueue(hold, name, count, data, timeout, ephemeral == '1')
end

while at <= last do
--#save
  local well, answer = pcall(act)
  if not well then
    answer = {'error', type(answer) == 'table' and answer.err or tostring(answer)}
    loaded, dirty = {}, {}
    known = loaded
  end
  answers[#answers + 1] = answer
  at = at + (ARGV[at] == 'w' and 2 or ARGV[at] == 'm' and 3 or 7)
--#usual
end
--#save
for each = 1, #news do
  answers[#answers + 1] = news[each]
end
return answers
end

return beyond()
