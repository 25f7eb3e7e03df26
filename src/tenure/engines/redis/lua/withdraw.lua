-- ARGV: session, token, hold. Takes a request out of its queue, if it is there.
--#head
local id, token, hold = unpack(ARGV)
local session = P .. 's:' .. id
local s = call('HMGET', session, 'a', 'u', 'n', hold)
local alive = s[1] == token and tonumber(s[2]) > now
local order, name
if alive then
  if s[4] then
    order, name = string.match(s[4], '^(%d+) (.*)$')
    call('HDEL', session, hold)
  end
  if not order then
    return 0
  end
  -- The usual case: a mutex that nobody waits for. Three fields are one grant: o, w, and itself;
  -- a semaphore in any other state has more.
  local key = P .. 'm:' .. s[3] .. ':' .. name
  if not watched and call('HLEN', key) == 3 then
    call('DEL', key)
    return 0
  end
end
--#rules
--#body
if not alive then
  return over(id)
end
expire()
local m = load(s[3], name)
local r = request_in(m, order)
if r then
  leave(m, order, r)
  settle()
end
return 0
