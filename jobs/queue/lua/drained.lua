#!lua flags=allow-oom
-- Registers a part that is durable on disk, removes its lines' results, and updates the record's
-- fields about the disk.
-- ARGV: batch, name of the part, most undrained result bytes of a batch, number of lines, lines...,
--       then (field, value) each
-- Returns 1 when the part is registered (now or before), 0 when the result of one of its lines is
-- not here: another part holds it.

local batch, part, most_undrained = ARGV[1], ARGV[2], tonumber(ARGV[3])
local last = 4 + ARGV[4]
local results = key.results(batch)
if redis.call('HEXISTS', key.parts(batch), part) == 1 then
  return 1
end
local bytes, undrained = 0, redis.call('HGET', key.batch(batch), 'result_bytes')
for _, size in ipairs(sizes_of(results, {unpack(ARGV, 5, last)}, undrained)) do
  if size == 0 then
    return 0
  end
  bytes = bytes + size
end
redis.call('HSET', key.parts(batch), part, ARGV[4])
redis.call('HDEL', results, unpack(ARGV, 5, last))
if #ARGV > last then
  redis.call('HSET', key.batch(batch), unpack(ARGV, last + 1))
end
redis.call('HINCRBY', key.batch(batch), 'result_bytes', -bytes)
resume_drained(batch, most_undrained)
return 1
