#!lua flags=allow-oom
-- Extends leases and the worker's place in the registry, and adds the tokens that it generated
-- since to the totals.
-- ARGV: worker, lease in ms, tokens that the worker generated in its life, then (name, fence) each
-- Returns 1, or 0 when the worker is not registered, then the names that it does not hold under
-- that fence.

local worker, lease, generated = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local answer = {redis.call('HEXISTS', key.WORKERS, worker)}
redis.call('ZADD', key.ALIVE, 'XX', now + 3 * lease, worker)
count_generated(worker, generated)
for i = 4, #ARGV, 2 do
  if holds(worker, ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', key.LEASES, now + lease, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
