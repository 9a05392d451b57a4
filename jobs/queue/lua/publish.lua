#!lua
-- Appends the next tokens to requests' token streams, which are the requests' checkpoints.
-- ARGV: worker, tokens that it generated in its life,
--       then (name, fence, output tokens before these and with them, chunks (msgpack),
--       API process or '', accepted 0/1) each
-- Returns the names of requests that the worker does not hold under that fence; nothing is written
-- for them.
-- A server that lost its last second (power loss) lacks tokens that were published to it. A
-- checkpoint must have no hole, so such a request is taken from its worker and continues from what
-- is left; no attempt is counted.

local worker, generated = ARGV[1], tonumber(ARGV[2])
local lost = {}

local function published_tokens(name)
  local last = redis.call('XREVRANGE', key.tokens(name), '+', '-', 'COUNT', 1)[1]
  return last and tonumber(string.match(last[1], '^%d+')) or 0
end

count_generated(worker, generated)
for i = 3, #ARGV, 7 do
  local name, fence, before, total, chunks, reply_to, accepted = unpack(ARGV, i, i + 6)
  local held = holds(worker, name, fence)
  if held and tonumber(before) <= published_tokens(name) then
    append(name, total .. '-' .. accepted, reply_to, chunks, 'a', accepted, '')
  else
    lost[#lost + 1] = name
    if held then
      local model, attempt, deaths, engine_crashes = take_from(worker, name, fence)
      requeue(name, model, attempt - 1, deaths, engine_crashes)
    end
  end
end
wake_for_quarantine()
return lost
