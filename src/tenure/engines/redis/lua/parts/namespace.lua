-- The beginning of every script. KEYS[1] is the namespace's "meta" key, whose prefix all keys share.
-- Times are whole microseconds of Redis's own clock. A Lua number is a double: whatever may be
-- above 2^53-1 (a limit, the count "whole") stays text, and is compared as text.
local call, ARGV = redis.call, ARGV
local P = string.sub(KEYS[1], 1, -5)
local clock = call('TIME')
local instant = #clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6)
instant = clock[1] .. instant -- now, as text
local now = instant + 0
local WHOLE = '18446744073709551615'
local KEEP = '172800000' -- milliseconds that Redis keeps what no client has looked after
-- Of "meta": e epoch, o the last order id, q until when nothing is granted, v until when changes are
-- published, p the later of both.
local epoch, last_order, later_end = unpack(call('HMGET', KEYS[1], 'e', 'o', 'p'))
-- A namespace without its epoch, or with another than the client knows, has lost its data.
if not epoch then
  return {'lost'}
end
local quarantine_end, published_end = '0', '0' -- if they are over
local quarantined, watched = false, false -- watched: whether a client watches anything
if not later_end or later_end > instant then
  quarantine_end, published_end = unpack(call('HMGET', KEYS[1], 'q', 'v'))
  quarantined = tonumber(quarantine_end) > now
  watched = published_end and tonumber(published_end) > now
end
