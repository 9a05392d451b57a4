#!lua flags=allow-oom
-- Extends leases and the worker's registration, and adds the tokens generated since the last report
-- to the totals.
-- ARGV: worker, lease in ms, tokens that the worker generated in its life, SHA-1 of the record that
--       it wrote last ('' if unknown), then (name, fence) each
-- Returns 1, or 0 if the registry has another record or none, then the names that the worker does
-- not hold under that fence.

local worker, lease, generated = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local record = redis.call('HGET', key.WORKERS, worker)
local answer = {record and (ARGV[4] == '' or redis.sha1hex(record) == ARGV[4]) and 1 or 0}
redis.call('ZADD', key.ALIVE, 'XX', now + 3 * lease, worker)
count_generated(worker, generated)
for i = 5, #ARGV, 2 do
  if holds(worker, ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', key.LEASES, now + lease, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
