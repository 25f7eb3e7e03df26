-- ARGV: session, token. Gives the session its window from now on.
--#head
--#body
--#rest
if not is_current(ARGV[1], ARGV[2]) then
  return over(ARGV[1])
end
touch(ARGV[1])
return 0
