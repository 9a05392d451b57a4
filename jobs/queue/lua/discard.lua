#!lua flags=allow-oom
-- Removes early lines, waiting, running or finished, with their results, streams and counts. The
-- first call detaches them from their input, so that a later call resumes what a killed one left.
-- ARGV: batch, its state, its generation, limit
-- Returns 1 if lines may remain, 0 if none does, -1, changing nothing, if the batch has another
-- state or generation.

local batch, limit = ARGV[1], tonumber(ARGV[4])
local record = redis.call('HMGET', key.batch(batch), 'state', 'generation')
if record[1] ~= ARGV[2] or record[2] ~= ARGV[3] then
  return -1
end
redis.call('HSET', key.batch(batch), 'early', 'discarded')
if drop_unfinished(batch, limit) then
  return 1
end
local lines, streams = redis.call('HRANDFIELD', key.results(batch), limit), {}
for i, line in ipairs(lines) do
  streams[i] = key.tokens(batch .. '/' .. line)
end
if #lines > 0 then
  redis.call('UNLINK', unpack(streams))
  redis.call('HDEL', key.results(batch), unpack(lines))
end
if #lines == limit then
  return 1
end
redis.call('UNLINK', key.done(batch), key.batch_models(batch))
redis.call('HDEL', key.batch(batch), 'early', 'early_tokens', 'used_lines', 'used_tokens', 'used_bytes')
redis.call('HSET', key.batch(batch), 'completed', 0, 'failed', 0, 'result_bytes', 0, 'body_bytes', 0)
if redis.call('XTRIM', key.batch_tokens(batch), 'MAXLEN', 0) > 0 then
  notify_readers(batch, '', 'discarded', '', '')
end
return 0
