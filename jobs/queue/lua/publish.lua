#!lua
-- Appends the next tokens to requests' token streams, which are the requests' checkpoints.
-- ARGV: worker, tokens that it generated in its life,
--       then (name, fence, output tokens before these and with them, chunks (msgpack),
--       API process or '', accepted: 0, 1 or the worker's fingerprint) each
-- Returns the names of requests that the worker does not hold under that fence; nothing is written
-- for them.

local worker, generated = ARGV[1], tonumber(ARGV[2])
local lost = {}

count_generated(worker, generated)
for i = 3, #ARGV, 7 do
  local name, fence, before, total, chunks, reply_to, accepted = unpack(ARGV, i, i + 6)
  if holds(worker, name, fence) and not take_if_tokens_are_missing(worker, name, fence, before) then
    append(name, total .. (accepted == '0' and '-0' or '-1'), reply_to, chunks, 'a', accepted, '')
  else
    lost[#lost + 1] = name
  end
end
wake_for_quarantine()
return lost
