-- ARGV: session, token, hold, name, count ("0" for none that could be right), data, timeout in
-- microseconds ("" for none), ephemeral, the highest order id that the client has seen.
-- Answers: an order id if granted, {order id, due} if it waits, 0 if refused.
--#head
local id, token, hold, name, count, data = unpack(ARGV, 1, 6)
local timeout, ephemeral = ARGV[7], ARGV[8] == '1'
local session = P .. 's:' .. id
local s = call('HMGET', session, 'a', 'u', 'n', hold)
local alive = s[1] == token and tonumber(s[2]) > now
local key = s[3] and P .. 'm:' .. s[3] .. ':' .. name

-- The usual case: a mutex that nobody has.
if alive and not s[4] and ephemeral and count == WHOLE and data == '' and not quarantined
    and not watched and call('EXISTS', key) == 0 then
  local number = math.max(meta[2] + 1, ARGV[9] + 1, now)
  local order, instant = string.format('%.0f', number), string.format('%.0f', now)
  call('HSET', KEYS[1], 'o', order)
  call('HSET', key, 'o', 1, 'w', 1,
    order, id .. ' ' .. hold .. ' ' .. count .. ' ' .. instant .. ' ' .. instant .. ' 0')
  call('PEXPIRE', key, KEEP)
  call('HSET', session, hold, order .. ' ' .. name)
  return number
end
--#rules
local limit, is_new, held, owners, whole, waiting

-- Whether it could be granted at once; what is wrong with it, otherwise.
local function look()
  local m = call('HMGET', key, 'l', 'h', 'o', 'w', 'n')
  is_new = not m[3]
  limit = m[1] or WHOLE
  if is_new then
    if not ephemeral then
      return false, {'missing'}
    end
    m = {false, 0, 0, '0', 0}
  elseif ephemeral == (m[1] and true or false) then
    return false, {'kind', ephemeral and 0 or 1}
  end
  if count == '0' or not at_most(count, limit) or (count ~= limit and not at_most(count, EXACT)) then
    return false, {'count', limit}
  end
  held, owners, whole, waiting = m[2] or 0, m[3] + 0, m[4] == '1', (m[5] or 0) + 0
  return waiting == 0 and not quarantined and fits(held, owners, whole, count, limit)
end

local function join(granted, deadline)
  local order, instant = next_order(tonumber(ARGV[9])), int(now)
  local since = granted and instant or '0'
  local record = id .. ' ' .. hold .. ' ' .. count .. ' ' .. instant .. ' ' .. since .. ' '
    .. (deadline or '0')
  if not granted then
    call('HSET', key, 'o', owners, 'w', whole and '1' or '0', 'n', waiting + 1, order, record)
  elseif count == limit then
    call('HSET', key, 'o', 1, 'w', '1', order, record)
  elseif at_most(limit, EXACT) then
    call('HSET', key, 'o', owners + 1, 'w', '0', 'h', int(held + count), order, record)
  else -- its sum is never needed
    call('HSET', key, 'o', owners + 1, 'w', '0', order, record)
  end
  if data ~= '' then
    call('HSET', key, 'D' .. order, data)
  end
  if ephemeral then
    call('PEXPIRE', key, KEEP)
  end
  call('HSET', session, hold, order .. ' ' .. name)
  return order
end

if alive and not s[4] then
  local grantable, wrong = look()
  if wrong then
    return wrong
  elseif grantable then
    local order = join(true)
    changed(s[3], name, is_new and 'b' or 'o')
    return tonumber(order)
  end
end
--#body
if not alive then
  return over(id)
end
if s[4] then -- sent before, and its answer was never seen
  local order = string.match(s[4], '^(%d+) ')
  if order then
    local r = request_in({key = key}, order)
    if not r then
      return {'gone'} -- not without the queue being lost
    elseif r.granted ~= '0' then
      return tonumber(order)
    end
    return {tonumber(order), due()}
  end
  return {tonumber(string.match(s[4], '(%d+)$')), due()}
end
if expire() then
  local grantable, wrong = look()
  if wrong then
    return wrong
  elseif grantable then
    local order = join(true)
    changed(s[3], name, is_new and 'b' or 'o')
    return tonumber(order)
  end
end
if timeout == '0' then
  return 0
end
local deadline = timeout ~= '' and int(now + timeout)
local order = join(false, deadline)
local waiters = P .. 'w:' .. s[3] .. ':' .. name
call('ZADD', waiters, order, order)
call('PEXPIRE', waiters, KEEP)
if deadline then
  call('ZADD', P .. 'd', deadline, order .. ' ' .. id .. ' ' .. hold)
  call('PEXPIRE', P .. 'd', KEEP)
  next_due = math.min(next_due, tonumber(deadline))
end
return {tonumber(order), due()}
