-- What the scripts that go beyond `operate` need besides.
local function is_current(id, token)
  local s = call('HMGET', P .. 's:' .. id, 'a', 'u')
  return s[1] == token and tonumber(s[2]) > now
end

local function data_of(m, order)
  if m.short then
    return m.short.data
  end
  return call('HGET', m.key, 'D' .. order) or ''
end

-- A Redis whose memory is full refuses the first write of a script if that takes memory, and nothing
-- behind a write that takes none. So who is there stays and is heard, and who has run out goes.
local function whatever_memory()
  call('DEL', P .. 'none')
end

-- Have changes published for a minute; what time it is, and until when that is.
local function be_watched()
  local till = now + 60000000
  call('HSET', KEYS[1], 'v', int(till), 'p', int(math.max(till, meta[3])))
  return {now, till}
end

-- Give a session its window from now on. What Redis keeps for it gets time to live, twice a day.
local function touch(id, grace)
  whatever_memory()
  local key = P .. 's:' .. id
  local s = call('HMGET', key, 'w', 'f', 'n', 'u')
  local till = math.max(now + s[1] + (grace or 0), grace and tonumber(s[4]) or 0)
  call('HSET', key, 'u', int(till))
  call('ZADD', P .. 'x', int(till), id)
  if now - s[2] > 43200000000 then
    call('HSET', key, 'f', instant)
    call('PEXPIRE', key, KEEP)
    for _, each in ipairs({'x', 'd', 'S:' .. s[3]}) do
      call('PEXPIRE', P .. each, KEEP)
    end
    local fields = call('HGETALL', key)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      local m = name and load(s[3], name)
      if m then
        call('PEXPIRE', m.waiters, KEEP)
        if not m.lasting then
          call('PEXPIRE', m.key, KEEP)
        end
      end
    end
  end
end

-- The names of the ephemeral semaphores of a node: those that its sessions use.
local function ephemeral_names(path)
  local known, names = {}, {}
  for _, id in ipairs(call('SMEMBERS', P .. 'S:' .. path)) do
    local fields = call('HGETALL', P .. 's:' .. id)
    for at = 1, #fields, 2 do
      local name = string.find(fields[at], '^%d') and string.match(fields[at + 1], '^%+?%d+ (.*)$')
      if name and not known[name] then
        known[name] = true
        local m = load(path, name)
        if m and not m.lasting then
          names[#names + 1] = name
        end
      end
    end
  end
  return names
end

-- Everything in a semaphore's queue: {order, record, data, session's description, its end} each.
local function requests_of(m)
  local records, data = m.record, {}
  if m.short then
    data[m.short.order] = m.short.data
  else
    local fields = call('HGETALL', m.key)
    records = {}
    for at = 1, #fields, 2 do
      if string.find(fields[at], '^%d') then
        records[fields[at]] = fields[at + 1]
      elseif string.sub(fields[at], 1, 1) == 'D' then
        data[string.sub(fields[at], 2)] = fields[at + 1]
      end
    end
  end
  local found = {}
  for order, record in pairs(records) do
    local s = call('HMGET', P .. 's:' .. parse(record).id, 'd', 'u')
    found[#found + 1] = {order, record, data[order] or '', s[1] or '', s[2] or '0'}
  end
  return found
end

local function describe(m, wanted)
  local data = not m.short and call('HGET', m.key, 'd') or ''
  local requests = (wanted or not m.exact) and requests_of(m) or {}
  local held = m.whole and m.limit or int(m.held)
  return {m.name, data, m.limit, m.lasting and 1 or 0, held, m.waiting, instant, requests}
end
