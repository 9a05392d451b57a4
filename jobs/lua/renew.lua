#!lua flags=allow-oom
-- Prolongs leases and the worker's place in the registry.
-- ARGV: worker, lease in ms, then (name, fence) each
-- Returns 1 or 0 (the registry does not know the worker), then the names that it does not hold under that fence.

local worker, lease = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local answer = {redis.call('HEXISTS', key.WORKERS, worker)}
redis.call('ZADD', key.ALIVE, 'XX', now + 3 * lease, worker)
for i = 3, #ARGV, 2 do
  if holds(worker, ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', key.LEASES, now + lease, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
