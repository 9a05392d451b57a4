-- Functions shared by the scripts: scripts.py prepends those that a script uses. `key` has the
-- names of jobs/queue/keys.py, `RUNS` the states of a batch that a job advances
-- (jobs/protocol/states.py). A request's name is "<batch>/<line>"; a live call's batch id starts
-- with "live_" and its line is 0.

local CONTROL_SECONDS = 600
local API_SECONDS = 300
local COUNTED_SECONDS = 86400
local SERVED_SECONDS = 600
local QUARANTINE_GROUP_SIZE = 16
-- More than FULL_BATCHES watched batches share the entries of FULL_BATCHES
local BATCH_ENTRIES, FEWEST_BATCH_ENTRIES, FULL_BATCHES = 20000, 1000, 4
local MOST_BYTES_OF_AN_ENTRY = 1024
local ANSWERED_ENTRIES = 5000
local API_ENTRIES, MOST_BYTES_OF_AN_API_ENTRY = 5000, 4096
local MOST_BYTES_OF_AN_API_RESULT = 16384 -- an embedding of 1,024 numbers as text
local BYTES_PER_TOKEN, GUESSED_OUTPUT = 4, 256 -- the cost of a request without an estimate
local MOST_CALLS = 500 -- most waiting live calls that one script drops, so that it does not block the server
local UNREAD_SECONDS = 60 -- the stream of a live call that ended exists for so long, whatever its size
local DRAIN_BYTES = 2 * 1024 * 1024 -- result bytes of a batch that justify a drain before the next tick
local READ_BYTES = 65536 -- values of so many bytes together are read to measure them
local NO_CHUNKS = '\144' -- an empty list in msgpack
local MOST_VALUES = 4000 -- arguments that `unpack` has room for in any case; an even number

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A number as Redis expects it; Lua's own text form loses digits above 1e14.
local function digits(number)
  return string.format('%d', number)
end

local function split(name)
  return string.match(name, '^(.+)/(%d+)$')
end

local function is_live(batch)
  return string.sub(batch, 1, 5) == 'live_'
end

-- The tenant's mark, a prefix of a live call's id (`new_live_id`).
local function tenant_of(name)
  return string.sub(name, 6, 17)
end

-- fence, attempt, worker, model; nil when no worker holds the request.
local function lease_of(name)
  local lease = redis.call('HGET', key.LEASE, name)
  if not lease then
    return nil
  end
  return string.match(lease, '^(%d+) (%d+) (%S+) (.*)$')
end

-- attempts, deaths, engine_crashes of a request that was released unfinished; nil for any other.
local function tries_of(text)
  if not text then
    return nil
  end
  local attempts, deaths, engine_crashes = string.match(text, '^(%d+) (%d+) (%d+)$')
  return tonumber(attempts), tonumber(deaths), tonumber(engine_crashes)
end

-- Whether `worker` holds the request under this fence.
local function holds(worker, name, fence)
  local held_fence, attempt, holder, model = lease_of(name)
  if held_fence == fence and holder == worker then
    return true, tonumber(attempt), model
  end
  return false
end

-- For each of the requests whether `worker` holds it under this fence.
local function which_held(worker, names, fences)
  local found = {}
  for i, lease in ipairs(redis.call('HMGET', key.LEASE, unpack(names))) do
    local fence, holder = string.match(lease or '', '^(%d+) %d+ (%S+) ')
    found[i] = fence == fences[i] and holder == worker
  end
  return found
end

-- Ends a worker's leases on the named requests.
local function release(worker, ...)
  redis.call('HDEL', key.LEASE, ...)
  redis.call('ZREM', key.LEASES, ...)
  redis.call('SREM', key.held(worker), ...)
end

-- Adds the tokens that a worker generated since its last report to the totals; `generated` counts
-- those of its life. Late and repeated reports add nothing, also after the worker's removal.
local function count_generated(worker, generated)
  if generated > 0 then
    local counted = tonumber(redis.call('SET', key.counted(worker), generated, 'EX', COUNTED_SECONDS, 'GET') or 0)
    if counted > generated then
      redis.call('SET', key.counted(worker), counted, 'EX', COUNTED_SECONDS)
    elseif counted < generated then
      redis.call('HINCRBY', key.TOTALS, 'generated', generated - counted)
    end
  end
end

-- Ends a worker's lease under this fence: model, attempt, deaths and engine_crashes of the request;
-- nil if the worker does not hold it.
local function take_from(worker, name, fence)
  local held, attempt, model = holds(worker, name, fence)
  if not held then
    return nil
  end
  local _, deaths, engine_crashes = tries_of(redis.call('HGET', key.TRIES, name))
  release(worker, name)
  return model, attempt, deaths or 0, engine_crashes or 0
end

-- Appends an order to the control stream of a worker or of the control plane.
local function notify(worker, kind, value, seconds)
  local stream = key.control(worker)
  redis.call('XADD', stream, 'MAXLEN', '~', 1000, '*', 'k', kind, 'v', value or '', 's', seconds or 0)
  redis.call('EXPIRE', stream, CONTROL_SECONDS)
end

-- Wakes all servers that offer to load this model, if no worker serves it. Each server checks by
-- itself whether it has room.
local function wake_loaders(model)
  if redis.call('EXISTS', key.serving(model)) == 0 then
    for _, server in ipairs(redis.call('SMEMBERS', key.loaders(model))) do
      redis.call('SREM', key.loaders(model), server)
      notify(server, 'bell')
    end
  end
end

-- Removes a worker from those that serve this model. Requests that came while it was the last one
-- woke no server, so servers are woken here.
local function end_serving(model, worker)
  redis.call('SREM', key.waiting(model), worker)
  if redis.call('SREM', key.serving(model), worker) == 1 then
    wake_loaders(model)
  end
end

-- Wakes workers that wait for requests of this model; for a live call also busy ones, if none
-- waits.
local function wake_workers(model, count, busy_too)
  wake_loaders(model)
  local idle = redis.call('SRANDMEMBER', key.waiting(model), count)
  for _, worker in ipairs(idle) do
    redis.call('SREM', key.waiting(model), worker)
    notify(worker, 'bell')
  end
  if busy_too and #idle == 0 then
    for _, worker in ipairs(redis.call('SRANDMEMBER', key.serving(model), 8)) do
      notify(worker, 'bell')
    end
  end
end

-- The scores of a ring are service received. A batch's score is in the class of its priority, a
-- range of CLASS numbers; a tenant's is in that of priority 0. Urgent batches are in a class before
-- all priorities, by the end of their window.
local CLASS, URGENT_PRIORITY = 2 ^ 45, -128

local function priority_of(score)
  return math.floor(score / CLASS)
end

local function is_urgent(score)
  return priority_of(score) == URGENT_PRIORITY
end

local function level_of(ring, priority)
  return key.level(priority == 0 and ring or ring .. '\0' .. priority)
end

-- A new member starts level with the last member served, so that it neither starves nor gets ahead;
-- a returning member keeps any service beyond that. A member in the class of another priority
-- moves.
local function add_to_ring(ring, member, priority)
  local score = redis.call('ZSCORE', ring, member)
  if score and priority_of(score) == priority then
    return
  end
  local first = priority * CLASS
  local range = {digits(first), '(' .. digits(first + CLASS)}
  local least = redis.call('ZRANGE', ring, range[1], range[2], 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2]
  local level = redis.call('GET', level_of(ring, priority)) or (least and least - first or 0)
  local served = redis.call('GETDEL', key.served(ring, member)) or 0
  redis.call('ZADD', ring, digits(first + math.max(tonumber(level), tonumber(served))), member)
end

-- The service of a former member expires after a while, and before the level: a new member must not
-- start below a returning one.
local function remove_from_ring(ring, member)
  local score = redis.call('ZSCORE', ring, member)
  if score then
    redis.call('ZREM', ring, member)
    local priority = priority_of(score)
    if not is_urgent(score) and redis.call('EXPIRE', level_of(ring, priority), 2 * SERVED_SECONDS) == 1 then
      redis.call('SET', key.served(ring, member), digits(score - priority * CLASS), 'EX', SERVED_SECONDS)
    end
  end
end

-- Adds service to the member of that score; an urgent member keeps its score.
local function serve(ring, member, score, service)
  if not is_urgent(score) then
    local priority = priority_of(score)
    redis.call('SET', level_of(ring, priority), digits(score - priority * CLASS), 'EX', 2 * SERVED_SECONDS)
    redis.call('ZINCRBY', ring, service, member)
  end
end

-- Adds service to a tenant; a higher weight gives it more turns.
local function serve_tenant(ring, tenant, score, service, weights)
  serve(ring, tenant, score, service / (redis.call('HGET', weights, tenant) or 1))
end

-- The score of an urgent batch, else nil.
local function urgent_score(risk, expires)
  return risk == 'urgent' and expires and URGENT_PRIORITY * CLASS + math.floor(expires) or nil
end

-- Puts a batch at its place in a ring.
local function place(ring, batch, priority, risk, expires)
  local urgent = urgent_score(risk, expires)
  if urgent then
    redis.call('ZADD', ring, digits(urgent), batch)
  else
    add_to_ring(ring, batch, tonumber(priority or 0))
  end
end

-- Adds the batch to the ring of this model, and its tenant to the model's tenants.
local function enlist(batch, model)
  local tenant, priority, risk, expires = unpack(
    redis.call('HMGET', key.batch(batch), 'tenant', 'priority', 'risk', 'expires_at')
  )
  place(key.ring(model, tenant), batch, priority, risk, expires)
  add_to_ring(key.tenants(model), tenant, 0)
end

-- Removes the batch from the ring, and the tenant too if that was its last batch.
local function leave(batch, model, tenant)
  local ring = key.ring(model, tenant)
  remove_from_ring(ring, batch)
  if redis.call('EXISTS', ring) == 0 then
    remove_from_ring(key.tenants(model), tenant)
  end
end

-- Adds the batch again after its undrained results exceeded the limit (`claim.lua`).
local function resume_drained(batch, most_undrained)
  if tonumber(redis.call('HGET', key.batch(batch), 'result_bytes') or 0) > most_undrained then
    return
  end
  for _, model in ipairs(redis.call('SMEMBERS', key.batch_models(batch))) do
    local ready = redis.call('LLEN', key.ready(batch, model))
    if ready > 0 then
      enlist(batch, model)
      wake_workers(model, ready, false)
    end
  end
end

-- Adds to the counts that limits of live calls are checked against.
local function count_live(model, name, calls, bytes)
  for _, usage in ipairs({key.live_usage('tenant', tenant_of(name)), key.live_usage('model', model)}) do
    redis.call('HINCRBY', usage, 'bytes', digits(bytes))
    if redis.call('HINCRBY', usage, 'calls', calls) <= 0 then
      redis.call('DEL', usage)
    end
  end
end

-- Removes all keys of a live call that ended, except its stream.
local function remove_live(name)
  redis.call('DEL', key.bodies((split(name))))
  local counted = redis.call('HGET', key.LIVE_CALLS, name)
  if counted then
    local bytes, _, model = string.match(counted, '^(%d+) (%S+) (.*)$')
    redis.call('HDEL', key.LIVE_CALLS, name)
    count_live(model, name, -1, -bytes)
  end
end

-- Whether a live call exists and has a client: an API process that is alive, or a reader of its
-- stream.
local function has_client(name)
  local counted = redis.call('HGET', key.LIVE_CALLS, name)
  if not counted or redis.call('EXISTS', key.bodies((split(name)))) == 0 then
    return false
  end
  local api = string.match(counted, '^%d+ (%S+)')
  return api == '-' or redis.call('EXISTS', key.api_alive(api)) == 1
    or tonumber(redis.call('ZSCORE', key.WATCHED, name) or 0) > now_ms()
end

-- Removes the note of a retained stream.
local function forget_note(name)
  local bytes = redis.call('HGET', key.RETAINED_BYTES, name)
  redis.call('ZREM', key.RETAINED, name)
  if bytes then
    redis.call('HINCRBY', key.RETAINED_BYTES, '', -bytes)
    redis.call('HDEL', key.RETAINED_BYTES, name)
  end
end

-- Removes the stream of a live call; returns the bytes of the streams still retained.
local function forget_stream(name)
  redis.call('UNLINK', key.tokens(name))
  forget_note(name)
  return tonumber(redis.call('HGET', key.RETAINED_BYTES, '') or 0)
end

-- Removes all keys of a live call that neither waits nor runs.
local function drop_live(name)
  remove_live(name)
  redis.call('HDEL', key.TRIES, name)
  redis.call('ZREM', key.WATCHED, name)
  forget_stream(name)
end

local function end_turns_if_empty(model, tenant)
  if redis.call('EXISTS', key.live_of(model, tenant)) == 0 then
    remove_from_ring(key.live_tenants(model), tenant)
  end
end

local dropped = 0 -- waiting calls without a client that this script found

local function drop_abandoned(name)
  drop_live(name)
  dropped = dropped + 1
end

-- Removes and returns the first waiting call of a tenant with this score in the ring; nil if it has
-- none, or if that had no client.
local function live_of_tenant(model, tenant, score)
  local ring = key.live_tenants(model)
  local name = redis.call('LPOP', key.live_of(model, tenant))
  local wanted = name and has_client(name)
  if wanted then
    local bytes = redis.call('HSTRLEN', key.bodies((split(name))), 0)
    serve_tenant(ring, tenant, tonumber(score), math.ceil(bytes / BYTES_PER_TOKEN + GUESSED_OUTPUT), key.LIVE_WEIGHTS)
  elseif name then
    drop_abandoned(name)
  end
  end_turns_if_empty(model, tenant)
  return wanted and name or nil
end

-- Removes and returns the first waiting call of the least served tenant; nil if none waits in
-- turns, or if too many were dropped.
local function next_live(model)
  while dropped < MOST_CALLS do
    local tenant, score = unpack(redis.call('ZRANGE', key.live_tenants(model), 0, 0, 'WITHSCORES'))
    local name = tenant and live_of_tenant(model, tenant, score)
    if name or not tenant then
      return name
    end
  end
end

-- Drops a line of a batch, except its entry in the ready list or in quarantine; returns the worker
-- that ran it, if any.
local function drop_line(name)
  local batch, line = split(name)
  local _, _, holder = lease_of(name)
  if holder then
    release(holder, name)
  end
  local size = redis.call('HSTRLEN', key.bodies(batch), line)
  if redis.call('HDEL', key.bodies(batch), line) == 1 then
    redis.call('HINCRBY', key.batch(batch), 'body_bytes', -size)
  end
  redis.call('HDEL', key.TRIES, name)
  redis.call('ZREM', key.WATCHED, name)
  redis.call('UNLINK', key.tokens(name))
  return holder
end

-- Whether a worker runs quarantined requests. It then holds no others, so one request is enough to
-- decide.
local function is_isolating(worker)
  local name = redis.call('SRANDMEMBER', key.held(worker))
  local _, _, engine_crashes = tries_of(name and redis.call('HGET', key.TRIES, name))
  return (engine_crashes or 0) > 0
end

-- model -> number of quarantine groups made by this call, and {number, members} of the unfilled one
local groups = {}

-- Puts the request into a quarantine group, for a worker that runs nothing else: up to 16 together,
-- or it alone after a second crash.
local function quarantine(name, model, engine_crashes)
  local made = groups[model] or {count = 0}
  local group = made.filling
  if engine_crashes > 1 or not group or group.members == QUARANTINE_GROUP_SIZE then
    local last = redis.call('ZREVRANGE', key.quarantined(model), 0, 0, 'WITHSCORES')[2]
    group = {number = tonumber(last or 0) + 1, members = 0}
    groups[model] = {count = made.count + 1, filling = engine_crashes == 1 and group or made.filling}
    redis.call('HSETNX', key.QUARANTINE_WAITS, model, digits(now_ms()))
  end
  group.members = group.members + 1
  redis.call('ZADD', key.quarantined(model), group.number, name)
end

-- Takes requests out of quarantine, if they are there.
local function remove_from_quarantine(model, names)
  local removed = redis.call('ZREM', key.quarantined(model), unpack(names))
  if removed > 0 and redis.call('EXISTS', key.quarantined(model)) == 0 then
    redis.call('HDEL', key.QUARANTINE_WAITS, model)
  end
end

-- Ends a live call without a result, waiting or running.
local function cancel_live(name)
  local _, _, holder = lease_of(name)
  local model = redis.call('HGET', key.bodies((split(name))), 'model')
  if holder then
    release(holder, name)
    notify(holder, 'cancel', name)
  elseif model then
    redis.call('LREM', key.live(model), 1, name)
    if redis.call('LREM', key.live_of(model, tenant_of(name)), 1, name) == 1 then
      end_turns_if_empty(model, tenant_of(name))
    end
    remove_from_quarantine(model, {name})
  end
  drop_live(name)
end

-- Ends up to `limit` lines of a batch without a result, waiting or running; returns whether some
-- may remain. The workers that run them get one notification, by the name of the batch, so that
-- their control stream is not trimmed.
local function drop_unfinished(batch, limit)
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
  return #names == limit
end

-- Wakes an idle worker for each quarantine group that this call made.
local function wake_for_quarantine()
  for model, made in pairs(groups) do
    local left = made.count
    for _, worker in ipairs(redis.call('SMEMBERS', key.waiting(model))) do
      if left > 0 and redis.call('EXISTS', key.held(worker)) == 0 then
        redis.call('SREM', key.waiting(model), worker)
        notify(worker, 'bell')
        left = left - 1
      end
    end
    wake_loaders(model)
  end
end

-- Requeues an unfinished request that no worker holds: with engine crashes into quarantine, else at
-- the head. A script that quarantines requests calls `wake_for_quarantine` at its end.
local function requeue(name, model, attempts, deaths, engine_crashes)
  local batch, line = split(name)
  local live = is_live(batch)
  if not live and redis.call('EXISTS', key.batch(batch)) == 0 then
    return
  end
  redis.call('HSET', key.TRIES, name, attempts .. ' ' .. deaths .. ' ' .. engine_crashes)
  if engine_crashes > 0 then
    quarantine(name, model, engine_crashes)
    return
  end
  if live then
    redis.call('LPUSH', key.live(model), name)
  else
    redis.call('LPUSH', key.ready(batch, model), line)
    enlist(batch, model)
  end
  wake_workers(model, 1, live)
end

-- The number of output tokens in a request's stream, as text: the prefix of entry ids.
local function published_tokens(name)
  local last = redis.call('XREVRANGE', key.tokens(name), '+', '-', 'COUNT', 1)[1]
  return last and string.match(last[1], '^%d+') or '0'
end

-- Whether a request's stream has `before` tokens. A server that lost its last second (power loss,
-- failover) lacks published tokens, and a stream must have no gap.
local function reaches(name, before)
  return (tonumber(before) or 0) <= tonumber(published_tokens(name))
end

-- Requeues a request whose stream has fewer than `before` tokens; it resumes from the tokens that
-- are left. No attempt is counted.
local function take_if_tokens_are_missing(worker, name, fence, before)
  if reaches(name, before) then
    return false
  end
  local model, attempt, deaths, engine_crashes = take_from(worker, name, fence)
  requeue(name, model, attempt - 1, deaths, engine_crashes)
  return true
end

local watched -- number of watched requests and batches, once this call has counted them

local function count_watched()
  watched = watched or redis.call('ZCARD', key.WATCHED)
  return watched
end

-- The set of requests that a client watches, directly or with their batch: a table of names.
local function watched_of(names)
  if count_watched() == 0 then
    return {}
  end
  local targets, batches = {}, {}
  for i, name in ipairs(names) do
    targets[i] = name
    batches[split(name)] = true
  end
  for batch in pairs(batches) do
    targets[#targets + 1] = batch
  end
  local watched, now = {}, now_ms()
  for i, deadline in ipairs(redis.call('ZMSCORE', key.WATCHED, unpack(targets))) do
    watched[targets[i]] = deadline and tonumber(deadline) > now or nil
  end
  local found = {}
  for _, name in ipairs(names) do
    found[name] = watched[name] or watched[(split(name))]
  end
  return found
end

local unread = {} -- batches without a stream of their own, as found by this call: no client reads them

-- Adds an entry to the stream of a batch, if it exists: about a request of it, or, without a name,
-- that its state changed.
local function notify_readers(batch, name, entry_id, chunks, succeeded)
  if not unread[batch] and count_watched() > 0 then
    local share = math.floor(BATCH_ENTRIES * FULL_BATCHES / math.max(FULL_BATCHES, count_watched()))
    local most = math.max(FEWEST_BATCH_ENTRIES, share)
    local added = redis.call('XADD', key.batch_tokens(batch), 'NOMKSTREAM', 'MAXLEN', '~', most, '*',
      'k', name, 'e', entry_id, 'p', #chunks <= MOST_BYTES_OF_AN_ENTRY and chunks or '', 's', succeeded)
    unread[batch] = not added
  end
end

-- Adds an entry to the stream of an API process.
local function notify_api(api, ...)
  redis.call('XADD', key.api(api), 'MAXLEN', '~', API_ENTRIES, '*', ...)
  redis.call('EXPIRE', key.api(api), API_SECONDS)
end

-- Adds an entry to a request's token stream; returns whether it is new.
local function store_entry(name, entry_id, chunks, more, value)
  local added = redis.pcall('XADD', key.tokens(name), entry_id, 'p', chunks, more, value)
  if type(added) == 'table' and added.err then
    if string.find(added.err, 'equal or smaller', 1, true) then
      return false
    end
    error(added)
  end
  return true
end

-- Appends to a request's token stream under the id "<tokens so far>-<kind>". An existing entry is
-- not changed, so repeats are harmless; only a new one is forwarded to the API process and to the
-- readers of the batch. A large one is stored once: its API process reads it here.
local function append(name, entry_id, reply_to, chunks, more, value, succeeded)
  if not store_entry(name, entry_id, chunks, more, value) then
    return
  end
  if reply_to ~= '' then
    local whole = #chunks + #value <= MOST_BYTES_OF_AN_API_RESULT and {'p', chunks, more, value} or {}
    notify_api(reply_to, 'k', name, 'e', entry_id, unpack(whole))
  end
  if count_watched() > 0 and not is_live(name) then
    notify_readers(split(name), name, entry_id, chunks, succeeded)
  end
end

-- Adds to the usage of an API key, if there is one.
local function count_for_key(key_id, prompt_tokens, completion_tokens, device_microseconds)
  if key_id and key_id ~= '' then
    redis.call('HINCRBY', key.KEY_USAGE, key_id .. ' prompt_tokens', prompt_tokens)
    redis.call('HINCRBY', key.KEY_USAGE, key_id .. ' completion_tokens', completion_tokens)
    if device_microseconds > 0 then
      redis.call('HINCRBY', key.KEY_USAGE, key_id .. ' device_microseconds', digits(device_microseconds))
    end
  end
end

-- Returns the sizes of the values of a hash, 0 for a missing one. `most` is what they may have
-- together: few bytes are read at once, of many only their sizes.
local function sizes_of(hash, fields, most)
  local sizes = {}
  if (tonumber(most) or 0) <= READ_BYTES then
    for i, value in ipairs(redis.call('HMGET', hash, unpack(fields))) do
      sizes[i] = value and #value or 0
    end
  else
    for i, field in ipairs(fields) do
      sizes[i] = redis.call('HSTRLEN', hash, field)
    end
  end
  return sizes
end

-- Stores results and counts of requests of one batch; both change only when the done bit flips.
-- Returns the number of tokens delivered, and of requests.
local function record_results(batch, items)
  local record = redis.call('HMGET', key.batch(batch), 'state', 'total', 'followed', 'body_bytes', 'result_bytes',
    'completed', 'failed', 'used_lines', 'used_tokens', 'used_bytes', 'key_id')
  if not record[1] then
    return 0, 0
  end
  local bodies = key.bodies(batch)
  local lines, sets, results, answered = {}, {}, {}, {}
  local freed, undrained, completed, failed, used_tokens, used_bytes = 0, 0, 0, 0, 0, 0
  local delivered, prompt_tokens, device_microseconds = 0, 0, 0
  for i, item in ipairs(items) do
    local line = item.line
    lines[i] = line
    sets[4 * i - 3], sets[4 * i - 2], sets[4 * i - 1], sets[4 * i] = 'SET', 'u1', line, '1'
  end
  local sizes = sizes_of(bodies, lines, record[4])
  for _, size in ipairs(sizes) do
    freed = freed + size
  end
  local was_done = redis.call('BITFIELD', key.done(batch), unpack(sets))
  for i, item in ipairs(items) do
    if was_done[i] == 0 then
      local count = #answered + 1
      answered[count], results[2 * count - 1], results[2 * count] = item.line, item.line, item.result
      undrained = undrained + #item.result
      if item.succeeded then
        completed = completed + 1
      else
        failed = failed + 1
      end
      used_bytes = used_bytes + sizes[i]
      used_tokens = used_tokens + item.prompt_tokens + item.tokens
      delivered = delivered + item.tokens
      prompt_tokens = prompt_tokens + item.prompt_tokens
      device_microseconds = device_microseconds + item.device_microseconds
    end
  end
  redis.call('HDEL', bodies, unpack(lines))
  local before = tonumber(record[5] or 0)
  completed, failed = completed + (record[6] or 0), failed + (record[7] or 0)
  redis.call('HSET', key.batch(batch), 'body_bytes', digits((record[4] or 0) - freed),
    'result_bytes', digits(before + undrained), 'completed', digits(completed), 'failed', digits(failed),
    'used_lines', digits((record[8] or 0) + #answered), 'used_tokens', digits((record[9] or 0) + used_tokens),
    'used_bytes', digits((record[10] or 0) + used_bytes))
  if #answered > 0 then
    redis.call('HSET', key.results(batch), unpack(results))
    count_for_key(record[11], prompt_tokens, delivered, device_microseconds)
    if record[3] then
      redis.call('XADD', key.answered(batch), 'NOMKSTREAM', 'MAXLEN', '~', ANSWERED_ENTRIES, '*',
        'l', table.concat(answered, ' '))
    end
    if (before < DRAIN_BYTES and before + undrained >= DRAIN_BYTES) or tonumber(record[2]) == completed + failed then
      notify(key.JOBS_CONTROL, 'batch', batch)
    end
  end
  return delivered, #answered
end

local function may_go(age, total, keep)
  return age > 1000 * keep.seconds or (total > tonumber(keep.bytes) and age > 1000 * UNREAD_SECONDS)
end

-- Notes the stream of a live call that ended, and removes the oldest ones if they have too many
-- bytes together, but none before its client had time to read it. The notes are removed with the
-- last stream.
local function note_retained(name, keep)
  local bytes, now = redis.call('MEMORY', 'USAGE', key.tokens(name)), now_ms()
  forget_note(name)
  redis.call('ZADD', key.RETAINED, now, name)
  redis.call('HSET', key.RETAINED_BYTES, name, bytes)
  local total = redis.call('HINCRBY', key.RETAINED_BYTES, '', bytes)
  for _ = 1, 10 do -- the next call that ends removes more
    local oldest = redis.call('ZRANGE', key.RETAINED, 0, 1, 'WITHSCORES')
    if #oldest == 2 or not may_go(now - oldest[2], total, keep) then
      break
    end
    total = forget_stream(oldest[1])
  end
  redis.call('EXPIRE', key.RETAINED, keep.seconds)
  redis.call('EXPIRE', key.RETAINED_BYTES, keep.seconds)
end

-- Appends the last entry of a token stream, which expires after `keep.seconds`; streams of live
-- calls have at most `keep.bytes` together.
local function append_last(item, keep)
  local total, chunks = item.total, item.chunks
  if not total or total == '' then
    total, chunks = published_tokens(item.name), NO_CHUNKS
  end
  append(item.name, total .. '-2', item.reply_to, chunks, 'f', item.result, item.succeeded and '1' or '0')
  redis.call('EXPIRE', key.tokens(item.name), keep.seconds)
  redis.call('ZREM', key.WATCHED, item.name)
  if is_live(item.name) then
    note_retained(item.name, keep)
  end
end

-- An error result that no worker produced, in the form that `finish` takes.
local function failed(name, result)
  local reply_to = redis.call('HGET', key.bodies((split(name))), 'reply_to') or ''
  return {
    name = name, succeeded = false, prompt_tokens = 0, tokens = 0, device_microseconds = 0, result = result,
    reply_to = reply_to,
  }
end

-- Ends requests that the script has just released, each named once: results, counts, last entries;
-- then removes their other keys.
-- items: {name, succeeded, prompt_tokens, tokens, device_microseconds, result, reply_to, total,
-- chunks} each; without a total no tokens are left to publish
local function finish(items, keep)
  if #items == 0 then
    return
  end
  local names, batches, delivered, ended = {}, {}, 0, 0
  for i, item in ipairs(items) do
    names[i] = item.name
    item.batch, item.line = split(item.name)
    batches[item.batch] = batches[item.batch] or {}
    table.insert(batches[item.batch], item)
  end
  redis.call('HDEL', key.TRIES, unpack(names))
  for batch, of_batch in pairs(batches) do
    local tokens, requests = of_batch[1].tokens, 1
    if is_live(batch) then
      local item = of_batch[1]
      local key_id = redis.call('HGET', key.bodies(batch), 'key_id')
      count_for_key(key_id, item.prompt_tokens, item.tokens, item.device_microseconds)
      remove_live(item.name)
    else
      tokens, requests = record_results(batch, of_batch)
    end
    delivered, ended = delivered + tokens, ended + requests
  end
  if ended > 0 then
    redis.call('HINCRBY', key.TOTALS, 'ended', ended)
  end
  if delivered > 0 then
    redis.call('HINCRBY', key.TOTALS, 'delivered', delivered)
  end
  local watched, silent = watched_of(names), {}
  for _, item in ipairs(items) do
    if is_live(item.batch) or watched[item.name] then
      append_last(item, keep)
    else
      silent[#silent + 1] = key.tokens(item.name)
    end
  end
  if #silent > 0 then
    redis.call('UNLINK', unpack(silent))
  end
end
