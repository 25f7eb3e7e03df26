-- One operation on a rate, by the rule of tenure.core.rates. ARGV: node, name, kind, limit, period,
-- burst, window, count, longest wait ("" for no limit), the time of the grant that is refunded.
-- Answers {"ok", limit, period and burst of the rate, whether granted, wait, time of the grant, free}.
--
-- A rate is one string: limit, period, burst, window, when its node was created, the latest change,
-- the number of bins, their times as differences, and their counts. It expires with its window.
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
local MOST_BINS, BINS = 10000, 100
local l, p, b, w = limit, per, burst, window
local times, counts, sum, moved = {}, {}, 0, false
local text = call('GET', key)
if text then
  local s = cmsgpack.unpack(text)
  if s[5] == node_born then
    l, p, b, w = s[1], s[2], s[3], s[4]
    local number, time, back = s[7], 0, math.max(s[6] - now, 0)
    moved = back > 0 -- the clock was set back
    for at = 1, number do
      time = time + s[7 + at]
      if time - back > now - w then
        times[#times + 1] = time - back
        counts[#counts + 1] = s[7 + number + at]
        sum = sum + counts[#counts]
      end
    end
    if #times == 0 then
      l, p, b, w = limit, per, burst, window
    end
  end
end
local function store()
  if #times == 0 then
    call('DEL', key)
    return
  end
  local s, before = {l, p, b, w, node_born, now, #times}, 0
  for _, time in ipairs(times) do
    s[#s + 1] = time - before
    before = time
  end
  for _, each in ipairs(counts) do
    s[#s + 1] = each
  end
  call('SET', key, cmsgpack.pack(s), 'PX', string.format('%.0f', math.ceil((before + w - now) / 1000) + 1))
end
local function share_bin(one, other)
  local width = math.ceil(w / BINS)
  return math.floor(one / width) == math.floor(other / width)
end
local granted, wait, at = false, 0, 0
if kind == 'resize' then
  l, p, b, w, granted = limit, per, burst, window, true
  moved = #times > 0
elseif kind == 'refund' then
  for here, time in ipairs(times) do
    if time >= refunded_at then
      if refunded_at + w > now and share_bin(time, refunded_at) then
        granted, moved = true, true
        local taken = math.min(count, counts[here])
        counts[here], sum = counts[here] - taken, sum - taken
        if counts[here] == 0 then
          table.remove(times, here)
          table.remove(counts, here)
        end
      end
      break
    end
  end
elseif l == limit and p == per and b == burst then
  local last = #times
  at = last > 0 and math.max(now, times[last]) or now
  local excess = sum + count - b
  for here = 1, excess > 0 and last or 0 do
    excess = excess - counts[here]
    if excess <= 0 then
      at = math.max(at, times[here] + w)
      break
    end
  end
  wait = at - now
  local shares = last > 0 and share_bin(times[last], at)
  granted = kind == 'take' and (not longest or wait <= longest) and (shares or last < MOST_BINS)
  if granted then
    moved = true
    local here = shares and last or last + 1
    times[here], counts[here], sum = at, (counts[here] or 0) + count, sum + count
  else
    at = 0
  end
end
if moved then
  store()
end
local free = 0
if #times == 0 or times[#times] <= now then
  free = math.max(b - sum, 0)
end
return {'ok', l, p, b, granted and 1 or 0, wait, at, free}
