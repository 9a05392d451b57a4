#!lua
-- Adds lines to a batch's ready list and moves its cursor; a repeated call finds the cursor moved.
-- ARGV: batch, cursor before, cursor after, stamp of the input of early lines ('' for those of the
--       plan), then (line, model, request) each, no line twice
-- Returns 1 if the cursor is at "after"; 0 if it is elsewhere, or the batch does not accept these
-- lines. A batch accepts lines of the plan while in progress, and early lines while it is
-- validated, all under one stamp.

local batch, before, after, stamp = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = redis.call('HMGET', key.batch(batch), 'state', 'cursor', 'early')
if record[1] ~= (stamp == '' and 'in_progress' or 'validating') then
  return 0
end
if stamp ~= '' then
  if (record[3] or '') ~= '' and record[3] ~= stamp then
    return 0
  end
  redis.call('HSET', key.batch(batch), 'early', stamp)
end
if record[2] ~= before then
  return record[2] == after and 1 or 0
end
redis.call('HSET', key.batch(batch), 'cursor', after)
local lines, reads = {}, {}
for i = 5, #ARGV, 3 do
  local count = #lines
  lines[count + 1] = ARGV[i]
  reads[3 * count + 1], reads[3 * count + 2], reads[3 * count + 3] = 'GET', 'u1', ARGV[i]
end
if #lines == 0 then
  return 1
end
local present = redis.call('HMGET', key.bodies(batch), unpack(lines))
local done = redis.call('BITFIELD_RO', key.done(batch), unpack(reads))
local bodies, bytes, added = {}, 0, {}
for i, line in ipairs(lines) do
  local model, request = ARGV[3 * i + 3], ARGV[3 * i + 4]
  if not present[i] and done[i] == 0 then
    bodies[#bodies + 1] = line
    bodies[#bodies + 1] = request
    bytes = bytes + #request
    added[model] = added[model] or {}
    table.insert(added[model], line)
  end
end
if #bodies > 0 then
  redis.call('HSET', key.bodies(batch), unpack(bodies))
  redis.call('HINCRBY', key.batch(batch), 'body_bytes', bytes)
end
for model, new in pairs(added) do
  redis.call('RPUSH', key.ready(batch, model), unpack(new))
  redis.call('SADD', key.batch_models(batch), model)
  enlist(batch, model)
  wake_workers(model, #new, false)
end
return 1
