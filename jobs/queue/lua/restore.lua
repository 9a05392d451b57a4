#!lua flags=allow-oom
-- Marks lines of a part on disk as done, after Redis lost their done bits or the part's
-- registration. Removes their other keys, and notifies a worker that runs one. Changes nothing in a
-- batch that has ended.
-- ARGV: batch, part to register ('' for none yet), lines of that part, most undrained result bytes
--       of a batch, how many of the lines succeeded, these lines, the lines that failed
-- Returns 1.

local batch, part, most_undrained, succeeded = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
if not RUNS[redis.call('HGET', key.batch(batch), 'state')] then
  return 1
end
local moves = {completed = 0, failed = 0, result_bytes = 0}
local restored, names = {}, {}

local function count_of(success)
  return success and 'completed' or 'failed'
end

-- The status of a Result (msgpack), by its first byte: cmsgpack cannot read its body.
local function status_of(result)
  local first, second, third = string.byte(result, 9, 11)
  if first == 205 then
    return second * 256 + third
  end
  return first == 204 and second or first
end

for i = 6, #ARGV do
  local line, counted = ARGV[i], count_of(i - 5 <= succeeded)
  if redis.call('SETBIT', key.done(batch), line, 1) == 0 then
    moves[counted] = moves[counted] + 1
    restored[line] = true
    names[#names + 1] = batch .. '/' .. line
  else
    local result = redis.call('HGET', key.results(batch), line)
    if result then
      local before = count_of(status_of(result) < 400)
      moves[before] = moves[before] - 1
      moves[counted] = moves[counted] + 1
      moves.result_bytes = moves.result_bytes - #result
      redis.call('HDEL', key.results(batch), line)
    end
  end
end
for _, name in ipairs(names) do
  local holder = drop_line(name)
  if holder then
    notify(holder, 'cancel', name)
  end
end
local tenant = redis.call('HGET', key.batch(batch), 'tenant')
for _, model in ipairs(#names > 0 and redis.call('SMEMBERS', key.batch_models(batch)) or {}) do
  remove_from_quarantine(model, names)
  local ready, left = key.ready(batch, model), {}
  local waiting = redis.call('LRANGE', ready, 0, -1)
  for _, line in ipairs(waiting) do
    if not restored[line] then
      left[#left + 1] = line
    end
  end
  if #left < #waiting then
    redis.call('DEL', ready)
    for i = 1, #left, MOST_VALUES do
      redis.call('RPUSH', ready, unpack(left, i, math.min(i + MOST_VALUES - 1, #left)))
    end
  end
  if #left == 0 then
    leave(batch, model, tenant)
  end
end
if part ~= '' then
  redis.call('HSET', key.parts(batch), part, ARGV[3])
end
for name, by in pairs(moves) do
  redis.call('HINCRBY', key.batch(batch), name, by)
end
if moves.result_bytes < 0 then
  resume_drained(batch, most_undrained)
end
return 1
