#!lua flags=allow-oom
-- Takes, extends or ends the lease of a process on a key (jobs/queue/lease.py).
-- ARGV: key, token of the process, milliseconds that the lease lasts from now on (0: it ends),
--       whether it may be taken 0/1
-- Returns 1, or 0 if the process does not hold the lease.

local name, token, lasts, may_take = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local holder = redis.call('GET', name)
if holder == token or (may_take and not holder) then
  if lasts == 0 then
    redis.call('DEL', name)
  else
    redis.call('SET', name, token, 'PX', lasts)
  end
  return 1
end
if may_take and redis.call('PTTL', name) > lasts then -- the server's clock was set back
  redis.call('PEXPIRE', name, lasts)
end
return 0
