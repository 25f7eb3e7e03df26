-- Some names of the semaphores of a node. ARGV: the node, "0" or the cursor of the previous answer, and how
-- many sessions and lasting semaphores a small node has at the most.
-- Answers {"ok", cursor, names}, with the cursor "0" at the end. A name may come twice, or be of a semaphore
-- that has just been deleted. Each call reads a few thousand keys at the most.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local path, cursor, few = ARGV[1], ARGV[2], tonumber(ARGV[3])
if call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end

-- Whether a node is small. The database of such a node may still have many keys of other programs.
local function is_small()
  if call('SCARD', P .. 'S:' .. path) + call('SCARD', P .. 'M:' .. path) > few then
    return false
  end
  local size = 0
  for _, id in ipairs(call('SMEMBERS', P .. 'S:' .. path)) do
    size = size + call('HLEN', P .. 's:' .. id)
    if size > 10 * few then
      return false
    end
  end
  return true
end

if cursor == '0' then
  expire()
  if is_small() then
    local names = ephemeral_names(path)
    for _, name in ipairs(call('SMEMBERS', P .. 'M:' .. path)) do
      names[#names + 1] = name
    end
    return {'ok', '0', names}
  end
end
local start = P .. 'm:' .. path .. ':'
local pattern = string.gsub(start, '([*?%[%]\\])', '\\%1') .. '*'
local following, keys = unpack(call('SCAN', cursor, 'MATCH', pattern, 'COUNT', '2000'))
for at, key in ipairs(keys) do
  keys[at] = string.sub(key, #start + 1)
end
return {'ok', following, keys}
