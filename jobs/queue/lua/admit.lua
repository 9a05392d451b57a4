#!lua flags=allow-oom
-- Counts an HTTP request of an API key against its rate limit: a bucket holds the requests of a
-- minute and refills over a minute (GCRA, ITU-T I.371; the stored value is the time at which it is
-- full).
-- ARGV: key id, requests per minute, token of the request (a repeat of the last one is not counted
--       again)
-- Returns 1 or 0 (admitted or not), requests left, ms until the next one is admitted, ms until the
-- bucket is full.

local name, per_minute, token = key.rate(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local minute = 60000000
local each = minute / per_minute
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local full, last = now, nil
local stored = redis.call('GET', name)
if stored then
  local micros, by = string.match(stored, '^(%d+) (.*)$')
  full, last = math.min(math.max(tonumber(micros), now), now + minute), by
end
local admitted = 1
if last ~= token then
  if full + each - now > minute + 1 then -- a microsecond of tolerance for rounding
    admitted = 0
  else
    full = full + each
    redis.call('SET', name, digits(full) .. ' ' .. token, 'PX', math.max(1, math.ceil((full - now) / 1000)))
  end
end
local left = math.floor((minute + 1 - (full - now)) / each)
local wait = left > 0 and 0 or math.ceil((full + each - now - minute) / 1000)
return {admitted, math.max(0, left), wait, math.ceil((full - now) / 1000)}
