-- ARGV: session and token, or "" and a node's path; which requests ("all", "owners", "none"); a name.
-- Answers {"ok", descriptions}: of that name, or of all if none is given.
--#include parts/sessions.lua
--#include parts/descriptions.lua
local id, path, wanted, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if id ~= '' then
  local token = path
  if not is_current(id, token) then
    return over(id)
  end
  path = call('HGET', P .. 's:' .. id, 'n')
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
if name then
  local m = load(path, name)
  return m and {'ok', {describe(m, wanted)}} or {'missing'}
end
local found = {}
for _, names in ipairs({call('SMEMBERS', P .. 'M:' .. path), ephemeral_names(path)}) do
  for _, each in ipairs(names) do
    found[#found + 1] = describe(load(path, each), wanted)
  end
end
return {'ok', found}
