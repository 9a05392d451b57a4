#!lua
-- Says that somebody reads the tokens of a request, or of every request of a batch.
-- ARGV: request or batch, seconds
-- Returns 1.

local target, seconds = ARGV[1], ARGV[2]
redis.call('ZADD', key.WATCHED, now_ms() + 1000 * seconds, target)
if split(target) then
  local _, _, holder = lease_of(target)
  if holder then
    tell(holder, 'watch', target, seconds)
  end
  return 1
end
for _, worker in ipairs(redis.call('HKEYS', key.WORKERS)) do
  tell(worker, 'watch', target, seconds)
end
return 1
