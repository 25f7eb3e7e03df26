-- ARGV: session, tokens of an attachment that was taken over and no longer considers leases held.
--#include parts/sessions.lua
local id = ARGV[1]
for _, token in ipairs({unpack(ARGV, 2)}) do
  if call('HDEL', P .. 's:' .. id, 'B' .. token) == 1 then
    push(id, 'A', '')
  end
end
return 0
