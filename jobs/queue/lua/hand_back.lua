#!lua flags=allow-oom
-- Puts requests back to the front of the queue, or among the suspects, as if this worker had not claimed them; their checkpoints stay.
-- ARGV: worker, 1 when they are no suspects any more else 0, then (name, fence) each, the one to come first given last
-- Returns the names that the worker does not hold under that fence; nothing changed for them.

local worker, acquitted = ARGV[1], ARGV[2] == '1'
local lost = {}
for i = 3, #ARGV, 2 do
  local name, fence = ARGV[i], ARGV[i + 1]
  local model, attempt, deaths, suspicions = take_from(worker, name, fence)
  if model then
    requeue(name, model, attempt - 1, deaths, acquitted and 0 or suspicions)
  else
    lost[#lost + 1] = name
  end
end
ring_for_trials()
return lost
