#!lua flags=allow-oom
-- Registers these parts and removes all others. Changes nothing in a batch that has ended or has
-- another generation.
-- ARGV: batch, its generation, then (part, lines) each
-- Returns 1.

local batch, parts = ARGV[1], key.parts(ARGV[1])
local record = redis.call('HMGET', key.batch(batch), 'state', 'generation')
if RUNS[record[1]] and record[2] == ARGV[2] then
  redis.call('DEL', parts)
  for i = 3, #ARGV, MOST_VALUES do
    redis.call('HSET', parts, unpack(ARGV, i, math.min(i + MOST_VALUES - 1, #ARGV)))
  end
end
return 1
