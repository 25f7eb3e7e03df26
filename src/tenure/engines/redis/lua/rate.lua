-- One operation on a rate, by the rule of tenure.core.rates. ARGV: node, name, kind, limit, period,
-- burst, window, count, longest wait ("" for no limit), the time of the grant that is refunded.
-- Answers {"ok", limit, period and burst of the rate, whether granted, wait, time of the grant, free}.
--
-- A rate is one list, which expires with its window: its bins, each "TIME COUNT", in the order of
-- their times; and behind them one record: limit, period, burst, window, the latest change, the sum
-- of the counts, and when its node was created. A take reads the bins at both ends alone.
--#include parts/namespace.lua
local path, name, kind = ARGV[1], ARGV[2], ARGV[3]
local limit, per, burst, window, count = unpack(ARGV, 4, 8)
limit, per, burst, window, count = limit + 0, per + 0, burst + 0, window + 0, count + 0
local longest, refunded_at = tonumber(ARGV[9]), ARGV[10] + 0
if call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
local node_born = call('HGET', P .. 'born', path) or ''
local key = P .. 'r:' .. path .. ':' .. name
local MOST_BINS, BINS, CHUNK = 10000, 100, 50
local RECORD, LAST = -1, -2 -- their places in the list
local l, p, b, w, seen, sum, bins = limit, per, burst, window, now, 0, 0
local changed = false
local function parsed(text)
  local time, tokens = string.match(text, '^(%d+) (%d+)$')
  return time + 0, tokens + 0
end
local function bin(place)
  return parsed(call('LINDEX', key, place))
end
local function text_of(time, tokens)
  return string.format('%.0f %.0f', time, tokens)
end
-- Pass each bin to `look` with its place, from the last one on, until it returns true.
local function from_the_last(look)
  for last = LAST, -bins - 1, -CHUNK do
    local texts = call('LRANGE', key, math.max(last - CHUNK + 1, -bins - 1), last)
    for at = #texts, 1, -1 do
      local time, tokens = parsed(texts[at])
      if look(time, tokens, last - #texts + at) then
        return
      end
    end
  end
end
local record = call('LINDEX', key, RECORD)
record = record and cmsgpack.unpack(record)
if record and record[7] == node_born then
  l, p, b, w, seen, sum = unpack(record, 1, 6)
  bins = call('LLEN', key) - 1
  local back = seen - now
  if back > 0 then -- the clock was set back
    for at, text in ipairs(call('LRANGE', key, 0, LAST)) do
      local time, tokens = parsed(text)
      call('LSET', key, at - 1, text_of(time - back, tokens))
    end
    changed, seen = true, now
  end
  local left = now - w
  if bin(LAST) <= left then
    l, p, b, w, sum, bins = limit, per, burst, window, 0, 0
  end
  while bins > 0 and bin(0) <= left do -- the last one has not left
    local gone = 0
    for _, text in ipairs(call('LRANGE', key, 0, CHUNK - 1)) do
      local time, tokens = parsed(text)
      if time > left then
        break
      end
      gone, sum = gone + 1, sum - tokens
    end
    call('LTRIM', key, gone, RECORD)
    bins, changed = bins - gone, true
  end
end
if record and bins == 0 then
  call('DEL', key)
end
local function share_bin(one, other)
  local width = math.ceil(w / BINS)
  return math.floor(one / width) == math.floor(other / width)
end
local last, tokens_of_last = 0, 0
if bins > 0 then
  last, tokens_of_last = bin(LAST)
end
local granted, wait, at = false, 0, 0
if kind == 'resize' then
  l, p, b, w, granted = limit, per, burst, window, true
  changed, seen = true, now
elseif kind == 'refund' then
  local place, of_place, tokens
  from_the_last(function(time, its, here)
    if time < refunded_at then
      return true
    end
    place, of_place, tokens = here, time, its
  end)
  if place and refunded_at + w > now and share_bin(of_place, refunded_at) then
    granted, changed, seen = true, true, now
    sum = sum - math.min(count, tokens)
    if tokens > count then
      call('LSET', key, place, text_of(of_place, tokens - count))
    elseif bins == 1 then
      call('DEL', key)
      bins = 0
    else
      call('LREM', key, -1, text_of(of_place, tokens))
      bins, last = bins - 1, bin(LAST)
    end
  end
elseif l == limit and p == per and b == burst then
  at = bins > 0 and math.max(now, last) or now
  local rest = b - count -- so many of the tokens may stay in the window
  if sum > rest then
    from_the_last(function(time, tokens)
      rest = rest - tokens
      if rest < 0 then
        at = math.max(at, time + w)
        return true
      end
    end)
  end
  wait = at - now
  local shares = bins > 0 and share_bin(last, at)
  granted = kind == 'take' and (not longest or wait <= longest) and (shares or bins < MOST_BINS)
  if granted then
    changed, seen, sum = true, now, sum + count
    if shares then
      call('LSET', key, LAST, text_of(at, tokens_of_last + count))
    elseif bins > 0 then
      call('LSET', key, RECORD, text_of(at, count))
      call('RPUSH', key, '')
    else
      call('RPUSH', key, text_of(at, count), '')
    end
    bins, last = shares and bins or bins + 1, at
  else
    at = 0
  end
end
if changed and bins > 0 then
  call('LSET', key, RECORD, cmsgpack.pack({l, p, b, w, seen, sum, node_born}))
  call('PEXPIRE', key, string.format('%.0f', math.ceil((last + w - now) / 1000) + 1))
end
local free = 0
if bins == 0 or last <= now then
  free = math.max(b - sum, 0)
end
return {'ok', l, p, b, granted and 1 or 0, wait, at, free}
