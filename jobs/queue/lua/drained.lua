#!lua flags=allow-oom
-- Registers a part that is durable on disk and removes its lines' results.
-- ARGV: batch, name of the part, most undrained result bytes of a batch, lines...
-- Returns 1 when the part is registered (now or before), 0 when the result of one of its lines is
-- not here: another part holds it.

local batch, part, most_undrained = ARGV[1], ARGV[2], tonumber(ARGV[3])
local results = key.results(batch)
if redis.call('HEXISTS', key.parts(batch), part) == 1 then
  return 1
end
local bytes = 0
for i = 4, #ARGV do
  local size = redis.call('HSTRLEN', results, ARGV[i])
  if size == 0 then
    return 0
  end
  bytes = bytes + size
end
redis.call('HSET', key.parts(batch), part, #ARGV - 3)
redis.call('HDEL', results, unpack(ARGV, 4))
redis.call('HINCRBY', key.batch(batch), 'result_bytes', -bytes)
resume_drained(batch, most_undrained)
return 1
