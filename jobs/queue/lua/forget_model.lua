#!lua flags=allow-oom
-- Removes the record of a model, unless a worker is registered for it.
-- ARGV: model
-- Returns 1 when there is none any more, 0 while it is served.

if redis.call('EXISTS', key.serving(ARGV[1])) == 1 then
  return 0
end
redis.call('HDEL', key.MODELS, ARGV[1])
redis.call('HDEL', key.LOAD_FAILURES, ARGV[1])
return 1
