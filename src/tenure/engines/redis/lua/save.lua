-- Have Redis know what has become of the session's holds.
if #put > 0 then
  call('HSET', session, unpack(put))
  call('HSET', KEYS[1], 'o', newest)
end
if #gone > 0 then
  call('HDEL', session, unpack(gone))
end
put, gone = {}, {}
