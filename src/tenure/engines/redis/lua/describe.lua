-- ARGV: session and token, or "" and a node's path; which requests ("all", "owners", "none"); a name.
-- Answers {"ok", descriptions}: of that name, or of all if none is given.
--#head
--#body
--#rest
local path = ARGV[2]
if ARGV[1] ~= '' then
  if not is_current(ARGV[1], ARGV[2]) then
    return over(ARGV[1])
  end
  path = call('HGET', P .. 's:' .. ARGV[1], 'n')
elseif call('HEXISTS', P .. 'nodes', path) == 0 then
  return {'no node'}
end
expire()
local wanted = ARGV[3]
if ARGV[4] then
  local m = load(path, ARGV[4])
  return m and {'ok', {describe(m, wanted)}} or {'missing'}
end
local found = {}
for _, names in ipairs({call('SMEMBERS', P .. 'M:' .. path), ephemeral_names(path)}) do
  for _, name in ipairs(names) do
    found[#found + 1] = describe(load(path, name), wanted)
  end
end
return {'ok', found}
