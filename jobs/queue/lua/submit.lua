#!lua
-- Submits a live call, unless its tenant or its model has reached a limit on calls or bytes.
-- ARGV: live id, model, request (msgpack), API process or '', most calls and bytes of a tenant, most
--       calls and bytes of a model, seconds that the API process counts as alive from now, id of
--       the API key or '' for none
-- Returns the tenant's number of calls with this one; 0 if the call exists already (waiting,
-- running, or its stream still exists), -1 at the tenant's limit, -2 at the model's.

local live_id, model, request, reply_to = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local name = live_id .. '/0'

-- The number of counted calls; nil at the limit.
local function calls_of(usage, most_calls, most_bytes)
  local calls, bytes = unpack(redis.call('HMGET', usage, 'calls', 'bytes'))
  calls, bytes = tonumber(calls or 0), tonumber(bytes or 0)
  local full = calls >= tonumber(most_calls) or (calls > 0 and bytes + #request > tonumber(most_bytes))
  return not full and calls or nil
end

if reply_to ~= '' then
  redis.call('SET', key.api_alive(reply_to), '1', 'EX', ARGV[9])
end
if redis.call('EXISTS', key.bodies(live_id), key.tokens(name)) > 0 then
  return 0
end
local calls = calls_of(key.live_usage('tenant', tenant_of(name)), ARGV[5], ARGV[6])
if not calls then
  return -1
elseif not calls_of(key.live_usage('model', model), ARGV[7], ARGV[8]) then
  return -2
end
local api = reply_to ~= '' and reply_to or '-'
redis.call('HSET', key.LIVE_CALLS, name, #request .. ' ' .. api .. ' ' .. model)
count_live(model, name, 1, #request)
redis.call('HSET', key.bodies(live_id), 0, request, 'model', model, 'reply_to', reply_to, 'since', digits(now_ms()))
if ARGV[10] ~= '' then
  redis.call('HSET', key.bodies(live_id), 'key_id', ARGV[10])
end
redis.call('RPUSH', key.live_of(model, tenant_of(name)), name)
add_to_ring(key.live_tenants(model), tenant_of(name), 0)
wake_workers(model, 3, true)
return calls + 1
