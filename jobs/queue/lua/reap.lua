#!lua flags=allow-oom
-- Takes requests from a dead worker, or from every worker whose leases expired. Each goes back to
-- the head of the queue (a quarantined one to quarantine), or ends with an error if too many
-- workers died with it.
-- ARGV: worker or '', lease in ms, most deaths, the error as a result (msgpack), seconds to keep a
--       watched stream, bytes to keep of those of live calls, limit
-- Returns the number of requests taken.
-- Without a worker it also stores time and server. If that note is missing, older than one lease
-- (at least 2 s, at most 5 s), in the future or of another server, nothing is taken for one lease:
-- the leases expired while their workers could not renew them. If quarantined requests have waited
-- too long for an idle worker, it orders one to requeue its requests. Live calls without a client
-- end.

local worker, lease, most_deaths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lost_result, keep, limit = ARGV[4], {seconds = ARGV[5], bytes = ARGV[6]}, tonumber(ARGV[7])
local LONGEST_GAP = math.min(5000, math.max(2000, lease))
local LONGEST_QUARANTINE_WAIT = 10000
local CALLS_A_TICK = 100 -- ending one searches the list where it waits
local BIGGEST_SEQ = '9007199254740991'

local function lose(name)
  local _, attempt, holder, model = lease_of(name)
  if not holder or (worker ~= '' and holder ~= worker) then
    redis.call('SREM', key.held(worker), name)
    return
  end
  local _, deaths, engine_crashes = tries_of(redis.call('HGET', key.TRIES, name))
  release(holder, name)
  if (deaths or 0) + 1 < most_deaths then
    requeue(name, model, attempt, (deaths or 0) + 1, engine_crashes or 0)
    return
  end
  finish({failed(name, lost_result)}, keep)
end

-- The last claimed is requeued first, so that the head of the queue keeps the order of claims.
local function lose_all(names)
  local fences = {}
  for _, name in ipairs(names) do
    fences[name] = tonumber((lease_of(name)) or 0)
  end
  table.sort(names, function(a, b) return fences[a] > fences[b] end)
  for _, name in ipairs(names) do
    lose(name)
  end
  wake_for_quarantine()
  return #names
end

local function strike_off(dead)
  local record = redis.call('HGET', key.WORKERS, dead)
  for _, model in ipairs(record and cmsgpack.unpack(record).models or {}) do
    end_serving(model, dead)
  end
  redis.call('HDEL', key.WORKERS, dead)
  redis.call('ZREM', key.ALIVE, dead)
  redis.call('UNLINK', key.control(dead))
end

-- Once per wait: the worker that gets the order claims a group, and that starts a new wait.
local function order_isolation(now)
  local waits = redis.call('HGETALL', key.QUARANTINE_WAITS)
  for i = 1, #waits, 2 do
    local model, waited = waits[i], now - waits[i + 1]
    if waited > LONGEST_QUARANTINE_WAIT or waited < 0 then
      redis.call('HSET', key.QUARANTINE_WAITS, model, digits(now))
      for _, one in ipairs(waited > 0 and redis.call('SRANDMEMBER', key.serving(model), 8) or {}) do
        if not is_isolating(one) then
          notify(one, 'isolate')
          break
        end
      end
    end
  end
end

-- Scans some of the live calls at each tick, and ends calls without a client.
local function end_abandoned_calls()
  local cursor = redis.call('HGET', key.TICK, 'live_cursor') or '0'
  local found = redis.call('HSCAN', key.LIVE_CALLS, cursor, 'COUNT', CALLS_A_TICK)
  redis.call('HSET', key.TICK, 'live_cursor', found[1])
  for i = 1, #found[2], 2 do
    local name = found[2][i]
    if not has_client(name) then
      cancel_live(name)
    end
  end
end

local function bring_near(ring, most)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ring, '(' .. digits(most), '+inf')) do
    redis.call('ZADD', ring, digits(most), member)
  end
end

if worker ~= '' then
  -- Rejects a late claim of the dead worker: its number is smaller.
  redis.call('HSET', key.claim(worker), 'seq', BIGGEST_SEQ, 'set', cmsgpack.pack({}))
  redis.call('PEXPIRE', key.claim(worker), lease)
  strike_off(worker)
  return lose_all(redis.call('SRANDMEMBER', key.held(worker), limit))
end

local now = now_ms()
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local tick = redis.call('HMGET', key.TICK, 'time', 'run_id', 'reap_after')
local last = tonumber(tick[1])
local reap_after = tonumber(tick[3] or 0)
if not last or now - last > LONGEST_GAP or now < last or tick[2] ~= run_id then
  reap_after = now + lease
end
if last and now < last then
  -- The clock was set back: earlier deadlines are now too far in the future.
  bring_near(key.LEASES, now + lease)
  bring_near(key.ALIVE, now + 3 * lease)
end
redis.call('HSET', key.TICK, 'time', now, 'run_id', run_id, 'reap_after', reap_after)
redis.call('ZREMRANGEBYSCORE', key.WATCHED, '-inf', now)
if now < reap_after then
  return 0
end
order_isolation(now)
end_abandoned_calls()
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', key.ALIVE, '-inf', now, 'LIMIT', 0, limit)) do
  strike_off(dead)
end
return lose_all(redis.call('ZRANGEBYSCORE', key.LEASES, '-inf', now, 'LIMIT', 0, limit))
