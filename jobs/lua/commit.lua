#!lua flags=allow-oom
-- Stores results, ends leases, moves the batch's counts where the done bit flips.
-- ARGV: worker, seconds to keep a watched stream,
--       then (name, fence, index, count, tokens, text, text offset, API process or '', succeeded 0/1, result) each;
--       index to text offset are '' when no tokens are left to publish
-- Returns the names for which nothing changed, because the worker does not hold them under that fence (any more).

local worker, keep = ARGV[1], ARGV[2]
local lost, items, names, seen = {}, {}, {}, {}
for i = 3, #ARGV, 10 do
  local name, fence = ARGV[i], ARGV[i + 1]
  if not seen[name] and holds(worker, name, fence) then
    seen[name] = true
    names[#names + 1] = name
    items[#items + 1] = {
      name = name, succeeded = ARGV[i + 8] == '1', result = ARGV[i + 9], reply_to = ARGV[i + 7],
      tokens = ARGV[i + 3] ~= '' and {ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6]} or {},
    }
  else
    lost[#lost + 1] = name
  end
end
if #names > 0 then
  release(worker, unpack(names))
  finish(items, keep)
end
return lost
