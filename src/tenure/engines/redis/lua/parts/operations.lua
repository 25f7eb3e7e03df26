-- Operations on any queue, for those that `operate` cannot carry out with a mutex in its short form.
--#include parts/expiry.lua
--#include parts/mending.lua
caller = {id = id, token = token, channel = channel, places = places}

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
local function join(m, request_id, name, count, data, granted, deadline)
  order = math.max(order + 1, now)
  local number = int(order)
  newest = number
  local r = {
    id = id, request_id = request_id, count = count, joined = instant, granted = granted and instant or '0',
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
      local whole = m.whole and '1' or '0'
      call('HSET', key, 'o', m.owners, 'w', whole, 'h', held_text(m), number, record)
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
  places[request_id] = number .. ' ' .. name
  put[#put + 1] = request_id
  put[#put + 1] = places[request_id]
  return order
end

local function enqueue(request_id, name, count, data, timeout, ephemeral)
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
    local number = join(m, request_id, name, count, data, true)
    changed(path, name, m and 'o' or 'b')
    return number
  elseif timeout == '0' then
    return quarantined and {'quarantined', quarantine_end - now} or 0
  end
  local deadline = timeout ~= '' and int(now + timeout)
  return {join(m, request_id, name, count, data, false, deadline), due()}
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

local function withdraw(request_id, place)
  local order, name = string.match(place, PLACE)
  places[request_id] = nil
  gone[#gone + 1] = request_id
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

local function act(kind, request_id, ...)
  if kind == 'w' then
    return withdraw(request_id, places[request_id])
  elseif places[request_id] then
    return found(places[request_id])
  end
  return enqueue(request_id, ...)
end

-- Carry out an operation; one that fails does not fail the others.
local function attempt(...)
  local well, answer = pcall(act, ...)
  if well then
    return answer
  end
  loaded, dirty = {}, {}
  return {'error', type(answer) == 'table' and answer.err or tostring(answer)}
end

-- Note that a mutex has changed without these functions.
local function forget(name)
  loaded[path .. ':' .. name] = nil
end

return {attempt = attempt, forget = forget, pushes = pushes, over = over}
