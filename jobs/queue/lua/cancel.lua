#!lua flags=allow-oom
-- Ends requests without a result, waiting or running, and notifies the workers that run them: once
-- by the name of a batch, however many of its lines they run, so that no order falls out of their
-- control stream.
-- ARGV: 'requests', 0, names of live calls...   or   'batch', limit, batch
-- Returns how many lines of the batch may be left (0: none); for requests always 0.

if ARGV[1] == 'requests' then
  for i = 3, #ARGV do
    cancel_live(ARGV[i])
  end
  return 0
end

local limit, batch = tonumber(ARGV[2]), ARGV[3]
local tenant = redis.call('HGET', key.batch(batch), 'tenant')
for _, model in ipairs(redis.call('SMEMBERS', key.batch_models(batch))) do
  redis.call('UNLINK', key.ready(batch, model))
  if tenant then
    leave(batch, model, tenant)
  end
end
local names, holders = redis.call('HRANDFIELD', key.bodies(batch), limit), {}
for i, line in ipairs(names) do
  names[i] = batch .. '/' .. line
  local holder = drop_line(names[i])
  if holder then
    holders[holder] = true
  end
end
for _, model in ipairs(#names > 0 and redis.call('SMEMBERS', key.batch_models(batch)) or {}) do
  remove_from_quarantine(model, names)
end
for holder in pairs(holders) do
  notify(holder, 'cancel', batch)
end
return #names == limit and 1 or 0
