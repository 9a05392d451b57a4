#!lua flags=allow-oom
-- Leaves nothing of a batch that ended but its record, and notes it among those that ended last.
-- ARGV: batch, token of the record's last transition, tenant, seconds to keep the record
-- Returns 1, or 0, changing nothing, when the record moved on.

local ENDED_BATCHES = 100

local batch, tenant = ARGV[1], ARGV[3]
if redis.call('HGET', key.batch(batch), 'token') ~= ARGV[2] then
  return 0
end
redis.call('SREM', key.ACTIVE, batch)
redis.call('ZREM', key.WAITING_BATCHES, batch)
redis.call('ZADD', key.ENDED, digits(now_ms()), batch)
redis.call('ZREMRANGEBYRANK', key.ENDED, 0, -ENDED_BATCHES - 1)
redis.call('SREM', key.open_batches(tenant), batch)
redis.call('HSET', key.batch(batch), 'result_bytes', 0) -- of results that go with the end
redis.call('EXPIRE', key.batch(batch), ARGV[4])
redis.call('UNLINK', key.bodies(batch), key.results(batch), key.done(batch), key.parts(batch), key.batch_models(batch))
return 1
