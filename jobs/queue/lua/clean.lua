#!lua flags=allow-oom
-- Removes all keys of an ended batch except its record, and adds it to the batches that ended last.
-- ARGV: batch, token of the record's last transition, tenant, seconds to keep the record
-- Returns 1, or 0, changing nothing, if the record has changed since.

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
redis.call('HSET', key.batch(batch), 'result_bytes', 0) -- the remaining results are removed with the batch
redis.call('EXPIRE', key.batch(batch), ARGV[4])
redis.call('UNLINK', key.bodies(batch), key.results(batch), key.done(batch), key.parts(batch), key.batch_models(batch))
return 1
