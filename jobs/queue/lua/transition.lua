#!lua flags=allow-oom
-- Changes the state of a batch by compare-and-set, and counts the batches that enter the new one.
-- ARGV: batch, token of this call, generation or '', required stamp of the input of early lines or
--       '', bitmap of done lines or '' to keep the stored one, new state, number of old states, old
--       states... ('' for no record), then (field, value) each
-- Returns 1 if this call changed the state (also on a repeat with the same token), else 0.

local batch, token, generation, stamp, done, to = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local count = tonumber(ARGV[7])
local record = redis.call('HMGET', key.batch(batch), 'state', 'token', 'generation', 'early')
local state, early = record[1] or '', record[4] or ''
if record[2] == token then
  return 1
end
local allowed = false
for i = 8, 7 + count do
  allowed = allowed or ARGV[i] == state
end
if not allowed or (generation ~= '' and record[3] ~= generation) then
  return 0
end
if stamp ~= '' and early ~= '' and early ~= stamp then
  return 0
end
redis.call('HSET', key.batch(batch), 'state', to, 'token', token, unpack(ARGV, 8 + count))
if done ~= '' then
  redis.call('SET', key.done(batch), done)
end
if state ~= '' and state ~= to then
  redis.call('HINCRBY', key.ENTERED, to, 1)
  notify_readers(batch, '', '', '', '')
end
if state ~= to then
  redis.call('SADD', key.BATCHES, batch)
end
return 1
