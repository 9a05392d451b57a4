#!lua
-- Adds lines to a batch's ready list and moves its cursor; a repeat finds the cursor moved.
-- ARGV: batch, cursor before, cursor after, then (line, model, request) each
-- Returns 1 when the cursor is at "after", 0 when it is elsewhere or the batch is not in progress.

local batch, before, after = ARGV[1], ARGV[2], ARGV[3]
local record = redis.call('HMGET', key.batch(batch), 'state', 'cursor')
if record[1] ~= 'in_progress' then
  return 0
end
if record[2] ~= before then
  return record[2] == after and 1 or 0
end
local bytes, added = 0, {}
for i = 4, #ARGV, 3 do
  local line, model, request = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local is_done = redis.call('GETBIT', key.done(batch), line) == 1
  if not is_done and redis.call('HSETNX', key.bodies(batch), line, request) == 1 then
    redis.call('RPUSH', key.ready(batch, model), line)
    bytes = bytes + #request
    added[model] = (added[model] or 0) + 1
  end
end
redis.call('HSET', key.batch(batch), 'cursor', after)
redis.call('HINCRBY', key.batch(batch), 'body_bytes', bytes)
for model, count in pairs(added) do
  redis.call('SADD', key.batch_models(batch), model)
  enlist(batch, model)
  wake_workers(model, count, false)
end
return 1
