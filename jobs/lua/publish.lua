#!lua
-- Appends the next tokens to requests' token streams; what stands there is the checkpoint.
-- ARGV: worker, then (name, fence, index, count, tokens, text, text offset, API process or '', accepted 0/1) each
-- Returns the names of requests that the worker does not hold under that fence; nothing was written for them.

local worker = ARGV[1]
local lost = {}
for i = 2, #ARGV, 9 do
  local name, fence, index, count = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if holds(worker, name, fence) then
    local entry_id = digits(index + count) .. ((count == '0') and '-1' or '-0')
    append(name, entry_id, ARGV[i + 7], index, ARGV[i + 4], ARGV[i + 5], ARGV[i + 6], 'a', ARGV[i + 8])
  else
    lost[#lost + 1] = name
  end
end
return lost
