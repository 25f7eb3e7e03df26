-- Frequent operations: those that a session called for together, in order.
-- ARGV: session, token, the highest order id that the client has seen; then for each operation
--   m, request id, name: a mutex, for ever
--   e, request id, name, count ("0" for none that could be right), data, timeout in microseconds (""
--     for none), ephemeral
--   E, as e: sent before, and its answer was never seen
--   w, request id: out of its queue, if it is there
-- Answers a list. For each operation: an order id if granted, {order id, due} if it waits, 0 if refused
-- or withdrawn, -1 if there was nothing to withdraw, {what is wrong, ...}; behind them, what would have
-- been published to the caller. A lone number is not put in a list.
--
-- A free mutex is taken by one write, and released by another: it is in its short form, for which no
-- function is needed. Everything else is in parts/operations.lua.
--#include parts/namespace.lua
local SMALL = 1024 -- bytes of data that are kept with a mutex in its short form
local id, token, seen, last = ARGV[1], ARGV[2], ARGV[3], #ARGV
local session = P .. 's:' .. id

local fields, at = {'a', 'u', 'n', 'c'}, 4
while at <= last do
  local kind, request_id = ARGV[at], ARGV[at + 1]
  if kind == 'w' or kind == 'E' then -- others are in no queue yet
    fields[#fields + 1] = request_id
  end
  at = at + (kind == 'w' and 2 or kind == 'm' and 3 or 7)
end
local s = call('HMGET', session, unpack(fields))
local current, till, path, channel = s[1], s[2], s[3], s[4]
local alive = current == token and till > instant
local places = {} -- of the requests, see parts/queues.lua
for each = 5, #fields do
  places[fields[each]] = s[each]
end

local order = math.max(last_order, seen) -- the last one
local newest -- that is given here, as text
local answers, put, gone = {}, {}, {} -- what the places become
local rare -- the functions for everything else, once they are needed
at = 4
repeat
  local kind, request_id, name, count, data, timeout, ephemeral
  local answer = true
  while at <= last and answer do
    kind, request_id = ARGV[at], ARGV[at + 1]
    local place, changed = places[request_id], false
    answer = nil
    if kind == 'w' then
      at = at + 2
      local number
      if place then
        number, name = string.match(place, '^%+(%d+) (.*)$')
      elseif alive then
        answer = -1
      end
      if alive and number then
        local key = P .. 'm:' .. path .. ':' .. name
        local record = redis.pcall('GETDEL', key)
        local mine = id .. ' ' .. request_id .. ' ' .. number .. ' '
        answer = -1
        if type(record) == 'string' and string.sub(record, 1, #mine) == mine then
          answer = 0
        elseif type(record) == 'string' then -- keys were lost
          call('SET', key, record, 'PX', KEEP)
        end
        places[request_id] = nil
        gone[#gone + 1] = request_id
        changed = true
      end
    else
      if kind == 'm' then
        name, count, data, timeout, ephemeral = ARGV[at + 2], WHOLE, '', '', '1'
        at = at + 3
      else
        name, count, data, timeout, ephemeral = unpack(ARGV, at + 2, at + 6)
        at = at + 7
      end
      if alive and not place and not quarantined
          and count == WHOLE and ephemeral == '1' and #data <= SMALL then
        local given = math.max(order + 1, now)
        local number = given == now and instant or string.format('%.0f', given)
        local record = id .. ' ' .. request_id .. ' ' .. number .. ' ' .. instant
        if data ~= '' then
          record = record .. ' ' .. data
        end
        local done = redis.pcall('SET', P .. 'm:' .. path .. ':' .. name, record, 'NX', 'PX', KEEP)
        if done and not done.err then
          place = '+' .. number .. ' ' .. name
          places[request_id] = place
          put[#put + 1] = request_id
          put[#put + 1] = place
          order, newest, answer, changed = given, number, given, true
        end
      end
    end
    answers[#answers + 1] = answer
    if changed and watched then
      call('PUBLISH', P .. 'c:' .. epoch .. ':' .. path .. ':' .. name, 'b')
    end
    if changed and rare then
      rare.forget(name)
    end
  end
  if #put > 0 then
    call('HSET', session, unpack(put))
    call('HSET', KEYS[1], 'o', newest)
  end
  if #gone > 0 then
    call('HDEL', session, unpack(gone))
  end
  if not answer then
    put, gone = {}, {}
    rare = rare or (function()
      --#include parts/operations.lua
    end)()
    if not alive then
      return rare.over(id)
    end
    answers[#answers + 1] = rare.attempt(kind, request_id, name, count, data, timeout, ephemeral == '1')
  end
until answer
for each = 1, rare and #rare.pushes or 0 do
  answers[#answers + 1] = rare.pushes[each]
end
return #answers == 1 and type(answers[1]) == 'number' and answers[1] or answers
