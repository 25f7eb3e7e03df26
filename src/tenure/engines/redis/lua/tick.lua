-- Ends what has run out, and grants what a quarantine held up. ARGV: "node:name" of each semaphore
-- with waiters; before them "1" if the client watches anything.
-- Answers {"ok", epoch, due, quarantine that is left, what `be_watched` says, if it does, and why there
-- is a quarantine}.
--#include parts/sessions.lua
local watches = ARGV[1] == '1'
whatever_memory()
note_time()
local published = watches and be_watched() or {}
expire()
for at = 2, #ARGV do
  local path, name = string.match(ARGV[at], '^([^:]*):(.*)$')
  local m = load(path, name)
  if m and m.waiting > 0 then
    dirty[m] = true
  end
end
settle()
return {'ok', epoch, due(), quarantined and quarantine_end - now or 0, published,
  quarantined and call('HGET', KEYS[1], 'h') or 'lost'}
