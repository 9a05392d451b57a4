#!lua flags=allow-oom
-- Takes requests from a worker whose engine core ended by itself with them in it. Each waits from now on among the suspects: at first in a
-- group, after a second such end alone; one that ran alone ends with an error.
-- ARGV: worker, the error as a result (msgpack), seconds to keep a watched stream, then (name, fence) each
-- Returns the names that the worker does not hold under that fence; nothing changed for them.

local worker, condemned, keep = ARGV[1], ARGV[2], ARGV[3]
local ALONE = 2
local lost, guilty = {}, {}
for i = 4, #ARGV, 2 do
  local name, fence = ARGV[i], ARGV[i + 1]
  local model, attempt, deaths, suspicions = take_from(worker, name, fence)
  if suspicions == ALONE then
    guilty[#guilty + 1] = failed(name, condemned)
  elseif model then
    requeue(name, model, attempt, deaths, suspicions + 1)
  else
    lost[#lost + 1] = name
  end
end
finish(guilty, keep)
ring_for_trials()
return lost
