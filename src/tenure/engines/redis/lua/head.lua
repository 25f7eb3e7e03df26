-- What every script begins with. KEYS[1] is the namespace's "meta" key, whose prefix all keys share.
-- Times are whole microseconds of Redis's own clock. A Lua number is a double: whatever may be
-- above 2^53-1 (a limit, the count "whole") stays text, and is compared as text.
local call, ARGV = redis.call, ARGV
local P = string.sub(KEYS[1], 1, -5)
local clock = call('TIME')
local instant = clock[1] .. string.sub('000000' .. clock[2], -6) -- now, as text
local now = instant + 0
local WHOLE = '18446744073709551615'
local KEEP = '172800000' -- milliseconds that Redis keeps what no client has looked after
-- A namespace without its epoch, or with another than the client knows, has lost its data. Of "meta": e
-- epoch, o the last order id, q until when nothing is granted, v until when changes are published, p the
-- later of both, t the latest time that was noted here.
local meta = call('HMGET', KEYS[1], 'e', 'o', 'q', 'v', 't')
if not meta[1] then
  return {'lost'}
end
local quarantined = tonumber(meta[3]) > now
local watched = meta[4] and tonumber(meta[4]) > now -- whether anybody watches anything
local set_back = meta[5] and now + 1000000 < tonumber(meta[5]) -- the clock was, since then
