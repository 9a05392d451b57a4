#!lua
-- Records that a client reads the tokens of a request, or of every request of a batch. A batch gets
-- a stream of its own for that time.
-- ARGV: request or batch, seconds
-- Returns the id of the last entry of the batch's stream, which always has one; '' for a request.

local target, seconds = ARGV[1], ARGV[2]
local deadline = math.max(now_ms() + 1000 * seconds, tonumber(redis.call('ZSCORE', key.WATCHED, target) or 0))
redis.call('ZADD', key.WATCHED, deadline, target)
if split(target) then
  local _, _, holder = lease_of(target)
  if holder then
    notify(holder, 'watch', target, seconds)
  end
  return ''
end
for _, worker in ipairs(redis.call('HKEYS', key.WORKERS)) do
  notify(worker, 'watch', target, seconds)
end
local stream = key.batch_tokens(target)
if redis.call('EXISTS', stream) == 0 then
  redis.call('XADD', stream, '*', 'k', '', 'e', '', 'p', '', 's', '')
end
redis.call('PEXPIREAT', stream, deadline)
return redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1][1]
