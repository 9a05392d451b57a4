#!lua flags=allow-oom
-- Removes what finished of a batch that has no plan: the results of its early lines, and their
-- counts. Of a batch with lines that wait or run it changes nothing.
-- ARGV: batch
-- Returns 1, or 0 when such lines are left.

local batch = ARGV[1]
if redis.call('EXISTS', key.bodies(batch)) == 1 then
  return 0
end
redis.call('UNLINK', key.results(batch), key.done(batch), key.batch_models(batch))
if redis.call('EXISTS', key.batch(batch)) == 1 then
  redis.call('HDEL', key.batch(batch), 'early', 'used_lines', 'used_tokens')
  redis.call('HSET', key.batch(batch), 'completed', 0, 'failed', 0, 'result_bytes', 0, 'body_bytes', 0)
end
return 1
