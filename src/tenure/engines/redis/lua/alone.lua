-- One mutex, in its short form, acquired or released without watchers: as `usual` does it, and nothing
-- besides, since a program that does one thing at a time waits for all of this.
if alive and not fields and not watched then
  local hold, name = ARGV[5], ARGV[6]
  if name and not quarantined then
    local given = math.max(order + 1, now)
    local number = given == now and instant or string.format('%.0f', given)
    local record = id .. ' ' .. hold .. ' ' .. number .. ' ' .. instant
    local done = redis.pcall('SET', prefix .. name, record, 'NX', 'PX', KEEP)
    if done and not done.err then
      call('HSET', session, hold, '+' .. number .. ' ' .. name)
      call('HSET', KEYS[1], 'o', number)
      return given
    end
    known = {[path .. ':' .. name] = true} -- `usual` need not try
  elseif s[4] then
    local number
    number, name = string.match(s[4], '^%+(%d+) (.*)$')
    if number then
      local record = redis.pcall('GETDEL', prefix .. name)
      local mine = id .. ' ' .. hold .. ' ' .. number .. ' '
      call('HDEL', session, hold)
      if type(record) == 'string' and string.sub(record, 1, #mine) == mine then
        return 0
      elseif type(record) == 'string' then -- keys were lost
        call('SET', prefix .. name, record, 'PX', KEEP)
      end
      return -1
    end
  end
end
