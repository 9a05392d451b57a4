#!lua
-- Reads results that are in no part yet, up to a number of bytes: the result that reaches it is the
-- last.
-- ARGV: batch, bytes, lines...
-- Returns the results of the first of these lines, false for a line without a result here.

local results, left, found = key.results(ARGV[1]), tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local result = redis.call('HGET', results, ARGV[i])
  found[i - 2] = result
  left = left - (result and #result or 0)
  if left <= 0 then
    break
  end
end
return found
