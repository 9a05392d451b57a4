#!lua
-- Appends the next tokens to requests' token streams; what stands there is the checkpoint.
-- ARGV: worker, then (name, fence, output tokens with these, chunks (msgpack), API process or '', accepted 0/1) each
-- Returns the names of requests that the worker does not hold under that fence; nothing was written for them.

local worker = ARGV[1]
local lost = {}
for i = 2, #ARGV, 6 do
  local name, fence, total, chunks, reply_to, accepted = unpack(ARGV, i, i + 5)
  if holds(worker, name, fence) then
    append(name, total .. '-' .. accepted, reply_to, chunks, 'a', accepted)
  else
    lost[#lost + 1] = name
  end
end
return lost
