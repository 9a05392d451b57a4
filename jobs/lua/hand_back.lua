#!lua flags=allow-oom
-- Puts requests back to the front of the queue as if this worker had not claimed them; their checkpoints stay.
-- ARGV: worker, then (name, fence) each, the one to come first given last
-- Returns the names that the worker does not hold under that fence; nothing changed for them.

local worker = ARGV[1]
local lost = {}
for i = 2, #ARGV, 2 do
  local name, fence = ARGV[i], ARGV[i + 1]
  local held, attempt, model = holds(worker, name, fence)
  if held then
    local _, deaths, suspicions = tries_of(redis.call('HGET', key.TRIES, name))
    release(worker, name)
    requeue(name, model, attempt - 1, deaths or 0, suspicions or 0)
  else
    lost[#lost + 1] = name
  end
end
return lost
