#!lua flags=allow-oom
-- Stores results, ends leases, moves the batch's counts where the done bit flips.
-- ARGV: worker, seconds to keep a watched stream,
--       then (name, fence, index, count, tokens, text, text offset, API process or '', succeeded 0/1, result) each;
--       index to text offset are '' when no tokens are left to publish
-- Returns the names for which nothing changed, because the worker does not hold them under that fence (any more).

local worker, keep = ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV, 10 do
  local name, fence = ARGV[i], ARGV[i + 1]
  if holds(worker, name, fence) then
    release(name, worker)
    local tokens = {ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6]}
    finish(name, ARGV[i + 8] == '1', ARGV[i + 9], ARGV[i + 7], keep, tokens)
  else
    lost[#lost + 1] = name
  end
end
return lost
