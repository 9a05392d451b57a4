#!lua
-- Counts a batch among its tenant's open ones, unless the tenant has reached its limit.
-- ARGV: tenant, batch, most ('' for any number)
-- Returns 1 if the batch is counted (now or before), else 0.

local open, batch, most = key.open_batches(ARGV[1]), ARGV[2], tonumber(ARGV[3])
if most and redis.call('SISMEMBER', open, batch) == 0 and redis.call('SCARD', open) >= most then
  return 0
end
redis.call('SADD', open, batch)
return 1
