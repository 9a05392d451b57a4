#!lua
-- Submits a live call.
-- ARGV: live id, model, request (msgpack), API process or ''
-- Returns 1, or 0 when it is here already (waiting, running, or its stream still exists).

local live_id, model, request, reply_to = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local name = live_id .. '/0'
if redis.call('EXISTS', key.bodies(live_id), key.tokens(name)) > 0 then
  return 0
end
redis.call('HSET', key.bodies(live_id), 0, request, 'model', model, 'reply_to', reply_to)
redis.call('RPUSH', key.live(model), name)
wake_workers(model, 3, true)
return 1
