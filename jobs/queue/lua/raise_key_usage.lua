#!lua flags=allow-oom
-- Raises counts of API keys to the saved ones, if the server restarted with older data.
-- ARGV: (field, count) each
-- Returns nothing.

for i = 1, #ARGV, 2 do
  if tonumber(redis.call('HGET', key.KEY_USAGE, ARGV[i]) or 0) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', key.KEY_USAGE, ARGV[i], ARGV[i + 1])
  end
end
