#!lua flags=allow-oom
-- Sets the risk of batches to miss the end of their completion windows, and updates the rank of
-- waiting ones.
-- ARGV: (batch, risk or '') each
-- Returns 1.

for i = 1, #ARGV, 2 do
  local batch, risk = ARGV[i], ARGV[i + 1]
  local state, tenant, priority, expires = unpack(
    redis.call('HMGET', key.batch(batch), 'state', 'tenant', 'priority', 'expires_at')
  )
  if state == 'in_progress' then
    redis.call('HSET', key.batch(batch), 'risk', risk)
    for _, model in ipairs(redis.call('SMEMBERS', key.batch_models(batch))) do
      local ring = key.ring(model, tenant)
      if redis.call('ZSCORE', ring, batch) then
        place(ring, batch, priority, risk, expires)
      end
    end
  end
end
return 1
