#!lua flags=allow-oom
-- Writes a worker's record, and its models' records if it is ready, in place of load failures.
-- ARGV: worker, ms that the record lasts without renewal, record (msgpack), ready 0/1, then
--       (model, record) each
-- Returns 1.

local worker, lasts, record, ready = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] == '1'
local now = now_ms()
redis.call('HSET', key.WORKERS, worker, record)
redis.call('ZADD', key.ALIVE, now + lasts, worker)
redis.call('SET', key.REGISTRY_SINCE, digits(now), 'NX')
for i = 5, #ARGV, 2 do
  local model = ARGV[i]
  if ready then
    redis.call('HSET', key.MODELS, model, ARGV[i + 1])
    redis.call('HDEL', key.LOAD_FAILURES, model)
    redis.call('SADD', key.serving(model), worker)
  else
    end_serving(model, worker)
  end
end
return 1
