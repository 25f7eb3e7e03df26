-- ARGV: session, tokens of an attachment that was taken over and no longer considers leases held.
--#head
--#body
--#rest
for at = 2, #ARGV do
  if call('HDEL', P .. 's:' .. ARGV[1], 'B' .. ARGV[at]) == 1 then
    tell(ARGV[1], 'A', '')
  end
end
return 0
