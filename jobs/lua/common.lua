-- Shared by every script, which scripts.py puts below it. `key` holds the names of jobs/keys.py.
-- A request's name is "<batch>/<line>"; a live call's batch id starts with "live_" and its line is 0.

local CONTROL_SECONDS = 600
local API_SECONDS = 300

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A number as Redis wants it; Lua's own text form loses digits above 1e14.
local function digits(number)
  return string.format('%.0f', number)
end

local function split(name)
  return string.match(name, '^(.+)/(%d+)$')
end

local function is_live(batch)
  return string.sub(batch, 1, 5) == 'live_'
end

-- fence, attempt, worker, model; nil when nobody holds the request.
local function lease_of(name)
  local lease = redis.call('HGET', key.LEASE, name)
  if not lease then
    return nil
  end
  return string.match(lease, '^(%d+) (%d+) (%S+) (.*)$')
end

-- attempts, deaths, suspicions of a request that was released unfinished; nil for one that never was.
local function tries_of(text)
  if not text then
    return nil
  end
  local attempts, deaths, suspicions = string.match(text, '^(%d+) (%d+) (%d+)$')
  return tonumber(attempts), tonumber(deaths), tonumber(suspicions)
end

-- Whether `worker` holds the request under this very fence.
local function holds(worker, name, fence)
  local held_fence, attempt, holder, model = lease_of(name)
  if held_fence == fence and holder == worker then
    return true, tonumber(attempt), model
  end
  return false
end

local function release(name, worker)
  redis.call('HDEL', key.LEASE, name)
  redis.call('ZREM', key.LEASES, name)
  redis.call('SREM', key.held(worker), name)
end

local function tell(worker, kind, value, seconds)
  local stream = key.control(worker)
  redis.call('XADD', stream, 'MAXLEN', '~', 1000, '*', 'k', kind, 'v', value or '', 's', seconds or 0)
  redis.call('EXPIRE', stream, CONTROL_SECONDS)
end

-- Wakes workers that wait for work of this model; for a live call also busy ones, when nobody waits.
local function ring_bell(model, count, busy_too)
  local idle = redis.call('SRANDMEMBER', key.waiting(model), count)
  for _, worker in ipairs(idle) do
    redis.call('SREM', key.waiting(model), worker)
    tell(worker, 'bell')
  end
  if busy_too and #idle == 0 then
    for _, worker in ipairs(redis.call('SRANDMEMBER', key.serving(model), 8)) do
      tell(worker, 'bell')
    end
  end
end

-- A newcomer starts level with the least served, so that it neither waits for long nor gets ahead.
local function join(ring, member)
  if not redis.call('ZSCORE', ring, member) then
    local first = redis.call('ZRANGE', ring, 0, 0, 'WITHSCORES')
    redis.call('ZADD', ring, first[2] or 0, member)
  end
end

-- The batch takes part in the sharing of this model's workers.
local function enlist(batch, model)
  local tenant = redis.call('HGET', key.batch(batch), 'tenant')
  join(key.ring(model, tenant), batch)
  join(key.tenants(model), tenant)
end

-- Leaves the ring, and the tenant too when that was its last batch.
local function leave(batch, model, tenant)
  local ring = key.ring(model, tenant)
  redis.call('ZREM', ring, batch)
  if redis.call('EXISTS', ring) == 0 then
    redis.call('ZREM', key.tenants(model), tenant)
  end
end

-- Puts an unfinished request that nobody holds any more back to the front.
local function requeue(name, model, attempts, deaths, suspicions)
  local batch, line = split(name)
  if is_live(batch) then
    redis.call('LPUSH', key.live(model), name)
  elseif redis.call('EXISTS', key.batch(batch)) == 1 then
    redis.call('LPUSH', key.ready(batch, model), line)
    enlist(batch, model)
  else
    return
  end
  redis.call('HSET', key.TRIES, name, attempts .. ' ' .. deaths .. ' ' .. suspicions)
  ring_bell(model, 1, is_live(batch))
end

local function is_watched(name, batch)
  return redis.call('EXISTS', key.watch(name), key.watch(batch)) > 0
end

-- Appends to a request's token stream under the id "<tokens so far>-<kind>". An entry that stands there already is left alone, which
-- makes repeats harmless; only a new one goes on to the API process.
local function append(name, entry_id, reply_to, index, tokens, text, offset, more, value)
  local added = redis.pcall('XADD', key.tokens(name), entry_id, 'i', index, 't', tokens, 'x', text, 'o', offset, more, value)
  if type(added) == 'table' and added.err then
    if string.find(added.err, 'equal or smaller', 1, true) then
      return
    end
    error(added)
  end
  if reply_to ~= '' then
    local stream = key.api(reply_to)
    redis.call('XADD', stream, 'MAXLEN', '~', 20000, '*',
      'k', name, 'e', entry_id, 'i', index, 't', tokens, 'x', text, 'o', offset, more, value)
    redis.call('EXPIRE', stream, API_SECONDS)
  end
end

local function forget_body(batch, line)
  if is_live(batch) then
    redis.call('DEL', key.bodies(batch))
    return
  end
  local size = redis.call('HSTRLEN', key.bodies(batch), line)
  if redis.call('HDEL', key.bodies(batch), line) == 1 then
    redis.call('HINCRBY', key.batch(batch), 'body_bytes', -size)
  end
end

-- Ends a request that its caller has just released: result, counts, last words, and nothing left behind.
-- tokens is {index, count, ids, text, offset}; count '' when there are no last tokens.
local function finish(name, succeeded, result, reply_to, keep, tokens)
  local batch, line = split(name)
  redis.call('HDEL', key.TRIES, name)
  forget_body(batch, line)
  if not is_live(batch) and redis.call('EXISTS', key.batch(batch)) == 1 and redis.call('SETBIT', key.done(batch), line, 1) == 0 then
    redis.call('HSET', key.results(batch), line, result)
    redis.call('HINCRBY', key.batch(batch), 'result_bytes', #result)
    redis.call('HINCRBY', key.batch(batch), succeeded and 'completed' or 'failed', 1)
    local counts = redis.call('HMGET', key.batch(batch), 'total', 'completed', 'failed')
    if tonumber(counts[1]) == tonumber(counts[2]) + tonumber(counts[3]) then
      tell(key.JOBS_CONTROL, 'batch', batch)
    end
  end
  if not is_live(batch) and not is_watched(name, batch) then
    redis.call('UNLINK', key.tokens(name))
    return
  end
  local index, count = tokens[1], tokens[2]
  if count == '' then
    local last = redis.call('XREVRANGE', key.tokens(name), '+', '-', 'COUNT', 1)[1]
    index, count = last and string.match(last[1], '^%d+') or '0', 0
  end
  append(name, digits(index + count) .. '-2', reply_to, index, tokens[3], tokens[4], tokens[5] == '' and '0' or tokens[5], 'f', result)
  redis.call('EXPIRE', key.tokens(name), keep)
  redis.call('DEL', key.watch(name))
end
