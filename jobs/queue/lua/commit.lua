#!lua flags=allow-oom
-- Stores results, ends leases, and updates the batch's counts when the done bit flips.
-- ARGV: worker, tokens that it generated in its life, seconds to keep a watched stream, bytes to
--       keep of those of live calls, then (name, fence, output tokens before these and with them,
--       chunks (msgpack), API process or '', succeeded 0/1, tokens of the prompt and of the output
--       as the answer counts them, microseconds of devices, result (msgpack)) each;
--       tokens and chunks are '' when none are left to publish
-- Returns the names of requests that the worker does not hold under that fence; nothing is stored
-- for them.

local worker, generated, keep = ARGV[1], tonumber(ARGV[2]), {seconds = ARGV[3], bytes = ARGV[4]}
local named, fences = {}, {}
count_generated(worker, generated)
for i = 5, #ARGV, 11 do
  named[#named + 1], fences[#fences + 1] = ARGV[i], ARGV[i + 1]
end
local held = #named > 0 and which_held(worker, named, fences) or {}
local lost, items, released, seen = {}, {}, {}, {}
for i, name in ipairs(named) do
  local _, fence, before, total, chunks, reply_to, succeeded, prompt_tokens, tokens, device, result =
    unpack(ARGV, 11 * i - 6, 11 * i + 4)
  local taken = held[i] and not seen[name]
  seen[name] = seen[name] or held[i]
  if taken and not (is_live(name) and take_if_tokens_are_missing(worker, name, fence, before)) then
    released[#released + 1] = name
    items[#items + 1] = {
      name = name, succeeded = succeeded == '1', prompt_tokens = tonumber(prompt_tokens), tokens = tonumber(tokens),
      device_microseconds = tonumber(device), result = result, reply_to = reply_to, total = total, chunks = chunks,
    }
  else
    lost[#lost + 1] = name
  end
end
if #released > 0 then
  release(worker, unpack(released))
  finish(items, keep)
end
wake_for_quarantine()
return lost
