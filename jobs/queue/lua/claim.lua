#!lua
-- Leases requests to a worker: live calls first, then batches by fair share; batches get at least a
-- tenth. Before these, a worker that holds nothing gets a group of quarantined requests; a worker
-- that holds quarantined requests gets no others.
-- ARGV: worker, number of this claim, limit, limit for live calls, lease in ms, most undrained
--       result bytes of a batch, most bytes of requests (separately for the share of batches),
--       limit for live calls beyond all others, one for each tenant but those whose marks follow,
--       these marks separated by spaces, models...
-- Returns a list of {name, fence, attempt, request, watched, engine_crashes, {chunks...}, weight};
-- chunks (msgpack) are those of each published entry, the weight is that of a live call's tenant.
-- A repeated number returns the same requests that the worker still holds; a smaller number returns
-- none.

local worker, seq = ARGV[1], tonumber(ARGV[2])
local limit, live_limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, most_undrained, enough_bytes = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local QUANTUM = 16 -- lines claimed from one batch in a row: neighbors in the plan share prefixes
local LIVE_PER_BATCH = 9
local MOST_TENANTS = 250 -- of those that wait, the least served, that may get a call beyond all limits

local function published_chunks(name)
  local entries = redis.call('XRANGE', key.tokens(name), '-', '+')
  for i, entry in ipairs(entries) do
    entries[i] = entry[2][2]
  end
  return entries
end

-- The rows of the reply. items: {name, fence, attempt, request, tries as stored} each
local function describe(items)
  if #items == 0 then
    return {}
  end
  local names, rows = {}, {}
  for i, item in ipairs(items) do
    names[i] = item.name
  end
  local watched = watched_of(names)
  for i, item in ipairs(items) do
    local _, _, engine_crashes = tries_of(item.tries)
    local is_watched = watched[item.name] and 1 or 0
    local chunks = item.tries and published_chunks(item.name) or {}
    local weight = is_live(item.name) and redis.call('HGET', key.LIVE_WEIGHTS, tenant_of(item.name)) or 1
    rows[i] = {item.name, tonumber(item.fence), item.attempt, item.request, is_watched, engine_crashes or 0, chunks,
      weight}
  end
  return rows
end

local function request_of(name)
  local batch, line = split(name)
  return redis.call('HGET', key.bodies(batch), line)
end

local function again(set)
  local items = {}
  for _, given in ipairs(cmsgpack.unpack(set)) do
    local name, fence = given[1], given[2]
    local held, attempt = holds(worker, name, fence)
    if held then
      local tries, request = redis.call('HGET', key.TRIES, name), request_of(name)
      items[#items + 1] = {name = name, fence = fence, attempt = attempt, request = request, tries = tries}
    end
  end
  return describe(items)
end

local last = redis.call('HMGET', key.claim(worker), 'seq', 'set')
if last[1] and seq <= tonumber(last[1]) then
  return seq == tonumber(last[1]) and again(last[2]) or {}
end

-- The requests of this claim: {name, model, request, fence, attempt, tries} each
local items, bytes = {}, 0
-- Without tries no request was ever released unfinished, so none is in quarantine.
local has_tries = redis.call('HLEN', key.TRIES) > 0

local function take(name, model, request)
  if request then
    items[#items + 1] = {name = name, model = model, request = request, fence = '', attempt = 1, tries = false}
    bytes = bytes + #request
  end
end

local function is_enough()
  return bytes >= enough_bytes
end

-- A server that came back empty starts above every earlier number: there are never a million claims
-- a second.
local function first_fence(count)
  local last = redis.call('INCRBY', key.FENCE, count)
  if last == count then
    last = redis.call('TIME')[1] * 1000000 + count
    redis.call('SET', key.FENCE, digits(last))
  end
  return last - count + 1
end

local function lease_all()
  local names, leases, deadlines = {}, {}, {}
  for i, item in ipairs(items) do
    names[i] = item.name
  end
  local tries = has_tries and redis.call('HMGET', key.TRIES, unpack(names)) or {}
  local fence, deadline = first_fence(#items), digits(now_ms() + lease)
  for i, item in ipairs(items) do
    item.tries, item.fence = tries[i], digits(fence + i - 1)
    item.attempt = (tries_of(tries[i]) or 0) + 1
    leases[2 * i - 1] = item.name
    leases[2 * i] = item.fence .. ' ' .. item.attempt .. ' ' .. worker .. ' ' .. item.model
    deadlines[2 * i - 1], deadlines[2 * i] = deadline, item.name
  end
  redis.call('HSET', key.LEASE, unpack(leases))
  redis.call('ZADD', key.LEASES, unpack(deadlines))
  redis.call('SADD', key.held(worker), unpack(names))
end

-- The mean cost of a finished line of the batch in tokens; until enough have finished, an estimate
-- from the size of its lines.
local function cost_of_a_line(used_lines, used_tokens, size)
  if used_lines >= QUANTUM then
    return math.max(1, used_tokens / used_lines)
  end
  return size / BYTES_PER_TOKEN + GUESSED_OUTPUT
end

-- The next batch that may run, of the least served tenant: batch, tenant, the scores of both,
-- number of ready lines, low water, cost and bytes of a line; or nil. Urgent batches come first,
-- then batches of the lowest priority, the least served first. A batch that may not run leaves the
-- ring; `drained` restores it.
local function next_batch(model)
  while true do
    local tenant, tenant_score = unpack(redis.call('ZRANGE', key.tenants(model), 0, 0, 'WITHSCORES'))
    if not tenant then
      return nil
    end
    local ring = key.ring(model, tenant)
    local batch, score = unpack(redis.call('ZRANGE', ring, 0, 0, 'WITHSCORES'))
    local state, undrained, low_water, used_lines, used_tokens, bytes_of_all = unpack(redis.call('HMGET',
      key.batch(batch or ''), 'state', 'result_bytes', 'low_water', 'used_lines', 'used_tokens', 'body_bytes'))
    local is_open = state == 'in_progress' or state == 'validating' -- with early lines
    local may_run = is_open and tonumber(undrained or 0) <= most_undrained
    local ready = may_run and redis.call('LLEN', key.ready(batch, model)) or 0
    if ready == 0 then
      leave(batch or '', model, tenant)
    else
      local size = tonumber(bytes_of_all or 0) / math.max(1, redis.call('HLEN', key.bodies(batch)))
      return {
        name = batch, tenant = tenant, score = tonumber(score), tenant_score = tonumber(tenant_score), ready = ready,
        low_water = tonumber(low_water or 0), size = math.max(1, size),
        cost = cost_of_a_line(tonumber(used_lines or 0), tonumber(used_tokens or 0), size),
      }
    end
  end
end

local function take_lines(model, most)
  local batch = next_batch(model)
  if not batch then
    return 0
  end
  local name, tenant = batch.name, batch.tenant
  local ready = key.ready(name, model)
  local room = math.ceil((enough_bytes - bytes) / batch.size)
  local lines, taken = redis.call('LRANGE', ready, 0, math.min(most, QUANTUM, room) - 1), 0
  local requests = redis.call('HMGET', key.bodies(name), unpack(lines))
  while taken < #lines and not is_enough() do
    taken = taken + 1
    take(name .. '/' .. lines[taken], model, requests[taken])
  end
  redis.call('LPOP', ready, taken)
  local service = math.ceil(taken * batch.cost)
  serve(key.ring(model, tenant), name, batch.score, service)
  serve_tenant(key.tenants(model), tenant, batch.tenant_score, service, key.WEIGHTS)
  local left = batch.ready - taken
  if left == 0 then
    leave(name, model, tenant)
  end
  if left <= batch.low_water and batch.ready > batch.low_water then
    notify(key.JOBS_CONTROL, 'batch', name)
  end
  return taken
end

local function take_batches(models, most)
  local taken = 0
  local open, turn = {}, seq % #models
  for i = 1, #models do
    open[i] = models[(turn + i) % #models + 1]
  end
  while taken < most and #open > 0 do
    for i = #open, 1, -1 do
      local got = taken < most and not is_enough() and take_lines(open[i], most - taken) or 0
      taken = taken + got
      if got == 0 then
        table.remove(open, i)
      end
    end
  end
  return taken
end

local function first_live(model)
  while dropped < MOST_CALLS do
    local name = redis.call('LPOP', key.live(model))
    if not name then
      return next_live(model)
    elseif has_client(name) then
      return name
    end
    drop_abandoned(name)
  end
end

local function take_live(models, most)
  local taken = 0
  for i = 1, #models do
    local model = models[(seq + i) % #models + 1]
    while taken < most and not is_enough() do
      local name = first_live(model)
      if not name then
        break
      end
      take(name, model, request_of(name))
      taken = taken + 1
    end
  end
  return taken
end

-- Takes a call of each tenant that waits and is not in `served`, a string of marks.
local function take_of_others(models, most, served)
  local taken = 0
  for i = 1, #models do
    local model = models[(seq + i) % #models + 1]
    local tenants = redis.call('ZRANGE', key.live_tenants(model), 0, MOST_TENANTS - 1, 'WITHSCORES')
    for j = 1, #tenants, 2 do
      local others = not string.find(served, tenants[j], 1, true)
      local name = others and taken < most and not is_enough() and live_of_tenant(model, tenants[j], tenants[j + 1])
      if name then
        take(name, model, request_of(name))
        taken = taken + 1
      end
    end
  end
end

-- The number of waiting live calls; counting stops at `most`.
local function count_waiting(model, most)
  local waiting = redis.call('LLEN', key.live(model))
  for _, tenant in ipairs(redis.call('ZRANGE', key.live_tenants(model), 0, most - 1)) do
    if waiting < most then
      waiting = waiting + redis.call('LLEN', key.live_of(model, tenant))
    end
  end
  return waiting
end

-- The oldest quarantine group of the first model that has one.
local function take_quarantined(models, most)
  for i = 1, #models do
    local model = models[(seq + i) % #models + 1]
    local group = redis.call('ZRANGE', key.quarantined(model), 0, 0, 'WITHSCORES')[2]
    if group then
      redis.call('HSET', key.QUARANTINE_WAITS, model, digits(now_ms()))
      for _, name in ipairs(redis.call('ZRANGEBYSCORE', key.quarantined(model), group, group, 'LIMIT', 0, most)) do
        if not is_enough() then
          remove_from_quarantine(model, {name})
          take(name, model, request_of(name))
        end
      end
      return
    end
  end
end

local function take_in_turn(models)
  local waiting_live, waiting_batches = 0, 0
  for _, model in ipairs(models) do
    waiting_live = waiting_live + count_waiting(model, live_limit)
    waiting_batches = waiting_batches + redis.call('ZCARD', key.tenants(model))
  end
  -- `owed`: live calls claimed while batches waited without a turn; stored under the worker's first
  -- model.
  local owed = waiting_batches > 0 and tonumber(redis.call('HGET', key.CREDIT, models[1]) or 0) or 0
  local wanted = math.min(waiting_live, live_limit)
  local kept = waiting_batches > 0 and math.min(math.floor((owed + wanted) / (LIVE_PER_BATCH + 1)), limit) or 0
  local live = take_live(models, math.min(wanted, live_limit - kept))
  local live_bytes, room = bytes, math.max(kept, limit - live)
  if is_enough() then
    kept = math.min(room, math.floor((owed + live) / LIVE_PER_BATCH))
    room = kept
  end
  bytes = kept > 0 and 0 or bytes -- the share of batches has a byte limit of its own
  local from_batches = take_batches(models, room)
  bytes = math.max(bytes, live_bytes)
  if waiting_live > 0 then
    live = live + take_live(models, live_limit - live - from_batches)
  end

  local left = math.max(0, owed + live - from_batches * LIVE_PER_BATCH)
  if waiting_batches > 0 and left > 0 then
    redis.call('HSET', key.CREDIT, models[1], math.min(left, 1000))
  elseif waiting_batches == 0 or owed > 0 then
    redis.call('HDEL', key.CREDIT, models[1])
  end
end

local models, isolating = {unpack(ARGV, 10)}, has_tries and is_isolating(worker)
if has_tries and limit > 0 and redis.call('EXISTS', key.held(worker)) == 0 then
  take_quarantined(models, limit)
  isolating = #items > 0
end
if not isolating then
  take_in_turn(models)
  if #items >= live_limit then
    take_of_others(models, tonumber(ARGV[8]), ARGV[9])
  end
end

if redis.call('HEXISTS', key.WORKERS, worker) == 1 then
  for _, model in ipairs(models) do
    redis.call((#items < limit and not isolating) and 'SADD' or 'SREM', key.waiting(model), worker)
  end
  if is_enough() or dropped >= MOST_CALLS then
    notify(worker, 'bell') -- it may have room for more
  end
end

local set = {}
if #items > 0 then
  lease_all()
  for i, item in ipairs(items) do
    set[i] = {item.name, item.fence}
  end
end
redis.call('HSET', key.claim(worker), 'seq', ARGV[2], 'set', cmsgpack.pack(set))
redis.call('PEXPIRE', key.claim(worker), 4 * lease)
return describe(items)
