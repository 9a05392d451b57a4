#!lua flags=allow-oom
-- Stores an estimate of the tokens of an open batch's requests, before a slice reads them.
-- ARGV: batch, tokens
-- Returns 1, or 0 for a batch that has ended or has no record.

local name = key.batch(ARGV[1])
local state, known = unpack(redis.call('HMGET', name, 'state', 'appended_tokens'))
if state ~= 'validating' and state ~= 'in_progress' then
  return 0
end
if tonumber(ARGV[2]) > tonumber(known or 0) then
  redis.call('HSET', name, 'appended_tokens', ARGV[2])
end
return 1
