#!lua flags=allow-oom
-- Puts requests back at the head of the queue, or into quarantine, as if this worker had not
-- claimed them; their checkpoints remain.
-- ARGV: worker, 1 to release them from quarantine else 0, then (name, fence) each, the first of the
--       queue last
-- Returns the names that the worker does not hold under that fence; nothing changes for them.

local worker, cleared = ARGV[1], ARGV[2] == '1'
local lost = {}
for i = 3, #ARGV, 2 do
  local name, fence = ARGV[i], ARGV[i + 1]
  local model, attempt, deaths, engine_crashes = take_from(worker, name, fence)
  if model then
    requeue(name, model, attempt - 1, deaths, cleared and 0 or engine_crashes)
  else
    lost[#lost + 1] = name
  end
end
wake_for_quarantine()
return lost
