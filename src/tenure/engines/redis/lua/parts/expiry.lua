-- The end of sessions and of waiting requests, by time or by request.
--#include parts/queues.lua
-- End a session; with `why`, it is notified. Nothing is granted before `settle`.
local function end_session(id, why)
  local fields = call('HGETALL', P .. 's:' .. id)
  local s, request_ids = {}, {}
  for at = 1, #fields, 2 do
    if string.find(fields[at], '^%d') then
      request_ids[#request_ids + 1] = fields[at + 1]
    else
      s[fields[at]] = fields[at + 1]
    end
  end
  call('ZREM', P .. 'x', id)
  if not s.n then
    return false
  end
  for _, place in ipairs(request_ids) do
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
      local order, id, request_id = string.match(d[1], '^(%d+) (%d+) (%d+)$')
      local path, place = unpack(call('HMGET', P .. 's:' .. id, 'n', request_id))
      local name = place and string.match(place, '^%d+ (.*)$')
      if name then
        local m = load(path, name, place)
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
    first = math.min(first, tonumber(quarantine_end))
  end
  return first == math.huge and -1 or math.max(0, first - now)
end

-- The answer to an attachment that is not the session's (any more).
local function over(id)
  local token, till = unpack(call('HMGET', P .. 's:' .. id, 'a', 'u'))
  if token and till and tonumber(till) > now then
    return {'taken'}
  end
  expire()
  return {'gone'}
end
