-- ARGV: session, token, and "0" for a write that gives it no time: a replica that has it has the writes
-- before it, too. Otherwise gives the session its window from now on.
--#head
--#body
--#rest
if not is_current(ARGV[1], ARGV[2]) then
  return over(ARGV[1])
end
if ARGV[3] == '0' then
  whatever_memory()
  call('HSET', P .. 's:' .. ARGV[1], 'a', ARGV[2])
else
  touch(ARGV[1])
end
return 0
