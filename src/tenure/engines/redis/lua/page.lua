-- Describe semaphores, as many as fit on a page. ARGV: their node, which requests ("all", "owners",
-- "none"), how many semaphores and requests a page has, names.
-- Answers {"ok", descriptions, the number of names that were looked up}.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local path, wanted, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
if call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
local found, size = {}, 0
for at = 4, #ARGV do
  local m = load(path, ARGV[at])
  if m then
    found[#found + 1] = describe(m, wanted)
    size = size + 1
    if wanted ~= 'none' then
      size = size + m.owners + (wanted == 'all' and m.waiting or 0)
    end
    if size >= most then
      return {'ok', found, at - 3}
    end
  end
end
return {'ok', found, #ARGV - 3}
