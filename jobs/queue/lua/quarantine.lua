#!lua flags=allow-oom
-- Takes requests from a worker whose engine core crashed with them in flight and quarantines them:
-- first in a group, after a second crash alone. A request that ran alone ends with an error.
-- ARGV: worker, the error as a result (msgpack), seconds to keep a watched stream, bytes to keep of
--       those of live calls, then (name, fence) each
-- Returns the names that the worker does not hold under that fence; nothing changes for them.

local worker, dead_letter, keep = ARGV[1], ARGV[2], {seconds = ARGV[3], bytes = ARGV[4]}
local ALONE = 2
local lost, dead_letters = {}, {}
for i = 5, #ARGV, 2 do
  local name, fence = ARGV[i], ARGV[i + 1]
  local model, attempt, deaths, engine_crashes = take_from(worker, name, fence)
  if engine_crashes == ALONE then
    dead_letters[#dead_letters + 1] = failed(name, dead_letter)
  elseif model then
    requeue(name, model, attempt, deaths, engine_crashes + 1)
  else
    lost[#lost + 1] = name
  end
end
finish(dead_letters, keep)
wake_for_quarantine()
return lost
