#!lua
-- Records that a run follows the answers of a batch: commits then append the lines that they answer
-- to a stream, which expires after the same time.
-- ARGV: batch, seconds
-- Returns the id of the stream's last entry.

local batch = ARGV[1]
local stream = key.answered(batch)
local last_id = redis.call('XADD', stream, 'MAXLEN', '~', ANSWERED_ENTRIES, '*', 'l', '')
redis.call('EXPIRE', stream, ARGV[2])
if redis.call('EXISTS', key.batch(batch)) == 1 then
  redis.call('HSET', key.batch(batch), 'followed', 1)
end
return last_id
