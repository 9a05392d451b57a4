#!lua flags=allow-oom
-- Takes requests away from a dead worker, or from every worker whose leases ran out; each goes back to the front of the queue (a suspect
-- among the suspects), or ends with an error when too many workers died with it.
-- ARGV: worker or '', lease in ms, most deaths, the error as a result (msgpack), seconds to keep a watched stream, limit
-- Returns how many requests it took.
-- Without a worker it also notes time and server; when the notes are missing, older than 5 s (or a shorter lease), of the future or
-- another server's, nothing is taken for one lease, since the leases ran out while their workers could not renew them. And where suspects
-- wait in vain for a worker that has nothing else, one is told to make room.

local worker, lease, most_deaths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lost_result, keep, limit = ARGV[4], ARGV[5], tonumber(ARGV[6])
local LONGEST_GAP = math.min(5000, math.max(2000, lease))
local LONGEST_WAIT_OF_SUSPECTS = 10000
local BIGGEST_SEQ = '9007199254740991'

local function lose(name)
  local _, attempt, holder, model = lease_of(name)
  if not holder or (worker ~= '' and holder ~= worker) then
    redis.call('SREM', key.held(worker), name)
    return
  end
  local _, deaths, suspicions = tries_of(redis.call('HGET', key.TRIES, name))
  release(holder, name)
  if (deaths or 0) + 1 < most_deaths then
    requeue(name, model, attempt, (deaths or 0) + 1, suspicions or 0)
    return
  end
  finish({failed(name, lost_result)}, keep)
end

-- Last claimed, first put back: at the front of the queue they stand in the order in which they were claimed.
local function lose_all(names)
  local fences = {}
  for _, name in ipairs(names) do
    fences[name] = tonumber((lease_of(name)) or 0)
  end
  table.sort(names, function(a, b) return fences[a] > fences[b] end)
  for _, name in ipairs(names) do
    lose(name)
  end
  ring_for_trials()
  return #names
end

local function strike_off(dead)
  local record = redis.call('HGET', key.WORKERS, dead)
  for _, model in ipairs(record and cmsgpack.unpack(record).models or {}) do
    redis.call('SREM', key.serving(model), dead)
    redis.call('SREM', key.waiting(model), dead)
  end
  redis.call('HDEL', key.WORKERS, dead)
  redis.call('ZREM', key.ALIVE, dead)
  redis.call('UNLINK', key.control(dead))
end

-- Once for each wait: whoever is told takes a group, which begins a new one.
local function order_trials(now)
  local waits = redis.call('HGETALL', key.TRIALS)
  for i = 1, #waits, 2 do
    local model, waited = waits[i], now - waits[i + 1]
    if waited > LONGEST_WAIT_OF_SUSPECTS or waited < 0 then
      redis.call('HSET', key.TRIALS, model, digits(now))
      for _, one in ipairs(waited > 0 and redis.call('SRANDMEMBER', key.serving(model), 8) or {}) do
        if not on_trial(one) then
          tell(one, 'trial')
          break
        end
      end
    end
  end
end

local function bring_near(ring, most)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ring, '(' .. digits(most), '+inf')) do
    redis.call('ZADD', ring, digits(most), member)
  end
end

if worker ~= '' then
  -- A claim that the dead worker sent with its last breath, and that arrives late, is refused as an old number.
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
  -- The clock went back: deadlines set before are too far away now.
  bring_near(key.LEASES, now + lease)
  bring_near(key.ALIVE, now + 3 * lease)
end
redis.call('HSET', key.TICK, 'time', now, 'run_id', run_id, 'reap_after', reap_after)
redis.call('ZREMRANGEBYSCORE', key.WATCHED, '-inf', now)
if now < reap_after then
  return 0
end
order_trials(now)
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', key.ALIVE, '-inf', now, 'LIMIT', 0, limit)) do
  strike_off(dead)
end
return lose_all(redis.call('ZRANGEBYSCORE', key.LEASES, '-inf', now, 'LIMIT', 0, limit))
