-- ARGV: session, token, number of the change, numbers whose answers have been seen, what, ...
--   create, name, limit, data, exist_ok, most semaphores
--   update, name, data
--   resize, name, limit
--   delete, name, force
--   alter, request id, count ("" as it is, "0" none that could be right), "1" if data, data, timeout
--     ("-" as it is, "" for ever, microseconds otherwise)
-- The answer is kept until it has been seen, so that a change sent again is not made again.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local id, token, number, seen_numbers, what = unpack(ARGV, 1, 5)
if not is_current(id, token) then
  return over(id)
end
local session = P .. 's:' .. id
local path = call('HGET', session, 'n')
for seen in string.gmatch(seen_numbers, '%d+') do
  call('HDEL', session, '=' .. seen)
end
local before = call('HGET', session, '=' .. number)
if before then
  return cjson.decode(before)
end
expire()

local function create(name, limit, data, exist_ok, most)
  local m = load(path, name)
  if m then
    if not m.lasting then
      return {'kind', 0}
    elseif exist_ok == '1' and m.limit == limit then
      return {'ok'}
    end
    return {'exists', m.limit}
  elseif call('SCARD', P .. 'M:' .. path) >= tonumber(most) then
    return {'full'}
  end
  call('HSET', P .. 'm:' .. path .. ':' .. name, 'l', limit, 'h', 0, 'o', 0, 'w', 0, 'n', 0)
  if data ~= '' then
    call('HSET', P .. 'm:' .. path .. ':' .. name, 'd', data)
  end
  call('SADD', P .. 'M:' .. path, name)
  changed(path, name, 'b')
  return {'ok'}
end

local function update(name, data)
  local m = load(path, name)
  if not m then
    return {'missing'}
  end
  lengthen(m)
  if (call('HGET', m.key, 'd') or '') ~= data then
    call('HSET', m.key, 'd', data)
    changed(path, name, 'd')
  end
  return {'ok'}
end

local function resize(name, limit)
  local m = load(path, name)
  if not m then
    return {'missing'}
  elseif not m.lasting then
    return {'kind', 0}
  elseif not m.exact then
    return {'unbounded', m.limit}
  elseif m.limit == limit then
    return {'ok'}
  end
  call('HSET', m.key, 'l', limit)
  m.limit, m.whole = limit, m.owners == 1 and m.held == tonumber(limit)
  for _, each in ipairs(requests_of(m)) do
    local r = parse(each[2])
    if r.granted == '0' and not at_most(r.count, limit) then
      remove(m, each[1], r, 'r' .. limit)
    end
  end
  changed(path, name, 'd')
  dirty[m] = true
  settle()
  return {'ok', due()}
end

local function delete(name, force)
  local m = load(path, name)
  if not m then
    return {'missing'}
  elseif m.owners + m.waiting > 0 and force ~= '1' then
    return {'busy'}
  end
  for _, each in ipairs(requests_of(m)) do
    remove(m, each[1], parse(each[2]), 'x')
  end
  dirty = {}
  call('DEL', m.key, m.waiters)
  call('SREM', P .. 'M:' .. path, m.name)
  changed(path, m.name, 'b')
  return {'ok'}
end

local function alter(request_id, count, has_data, data, timeout)
  local order, name = string.match(call('HGET', session, request_id) or '', PLACE)
  if not order then
    return {'released'}
  end
  local m = load(path, name)
  local r = request_in(m, order)
  if not r then
    return {'released'}
  end
  local owns = r.granted ~= '0'
  if count ~= '' and (count == '0' or not at_most(count, r.count)
      or (count ~= m.limit and not at_most(count, EXACT))) then
    return {'shrink', name, r.count, m.limit}
  end
  lengthen(m)
  if has_data == '1' and data ~= data_of(m, order) then
    if data == '' then
      call('HDEL', m.key, 'D' .. order)
    else
      call('HSET', m.key, 'D' .. order, data)
    end
    m.changed = m.changed or owns
  end
  if count ~= '' and count ~= r.count then
    if owns then
      m.held = m.held - amount(m, r.count) + amount(m, count)
      m.whole = false
      m.changed = true
    end
    r.count = count
    write_record(m, order, r)
  end
  if not owns and timeout ~= '-' then
    if r.deadline ~= '0' then
      call('ZREM', P .. 'd', due_member(order, r))
    end
    r.deadline = (timeout == '' or timeout == '0') and '0' or int(now + timeout)
    write_record(m, order, r)
    if r.deadline ~= '0' then
      call('ZADD', P .. 'd', r.deadline, due_member(order, r))
      next_due = math.min(next_due, tonumber(r.deadline))
      call('PEXPIRE', P .. 'd', KEEP)
    end
  end
  dirty[m] = true
  settle()
  if not owns and timeout == '0' then -- it does not wait any more, unless it was granted just now
    m = load(path, name)
    r = request_in(m, order)
    if r and r.granted == '0' then
      remove(m, order, r, 't')
      settle()
    end
  end
  return {'ok', due()}
end

local answer = ({create = create, update = update, resize = resize, delete = delete, alter = alter})[what](unpack(ARGV, 6))
call('HSET', session, '=' .. number, cjson.encode(answer))
return answer
