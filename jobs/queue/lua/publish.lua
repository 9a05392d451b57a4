#!lua
-- Appends the next tokens to requests' token streams, which are the requests' checkpoints.
-- ARGV: worker, tokens that it generated in its life,
--       then (name, fence, output tokens before these and with them, chunks (msgpack),
--       API process or '', accepted: 0, 1 or the worker's fingerprint) each
-- Returns the names of requests that the worker does not hold under that fence; nothing is written
-- for them.
-- What one call has for an API process comes to it as one entry, in msgpack: a list of (name, id of
-- the entry of the token stream, accepted, chunks or nil where they are large) each.

local MOST_BYTES_OF_A_GROUP = 8192
-- First bytes of values in msgpack: a text below 256 bytes, lists of any and of 4 values, nil
local STR8, ARRAY32, ARRAY_OF_4, NIL = '\217', '\221', '\148', '\192'
local worker, generated = ARGV[1], tonumber(ARGV[2])
local lost, named, fences, gone = {}, {}, {}, {}
local groups_of = {} -- by API process; false for one of the version before, which takes no groups

local function short_text(value)
  return STR8 .. string.char(#value) .. value
end

local function send_group(api)
  local group = groups_of[api]
  if group and #group.items > 0 then
    local list = ARRAY32 .. struct.pack('>I4', #group.items) .. table.concat(group.items)
    redis.call('XADD', key.api(api), 'MAXLEN', '~', API_ENTRIES, '*', 'g', list)
    redis.call('EXPIRE', key.api(api), API_SECONDS)
  end
  groups_of[api] = group and {items = {}, bytes = 0}
end

local function send(api, name, entry_id, chunks, accepted)
  if groups_of[api] == nil then
    groups_of[api] = redis.call('GET', key.api_alive(api)) == '1' and {items = {}, bytes = 0}
  end
  local group = groups_of[api]
  if not group then
    notify_api(api, name, entry_id, {'p', chunks, 'a', accepted}, #chunks + #accepted)
    return
  end
  local shown = #chunks <= MOST_BYTES_OF_AN_API_ENTRY and chunks or NIL
  local item = ARRAY_OF_4 .. short_text(name) .. short_text(entry_id) .. short_text(accepted) .. shown
  group.items[#group.items + 1] = item
  group.bytes = group.bytes + #item
  if group.bytes >= MOST_BYTES_OF_A_GROUP then
    send_group(api)
  end
end

count_generated(worker, generated)
for i = 3, #ARGV, 7 do
  named[#named + 1], fences[#fences + 1] = ARGV[i], ARGV[i + 1]
end
local held = #named > 0 and which_held(worker, named, fences) or {}
for i, name in ipairs(named) do
  local _, fence, before, total, chunks, reply_to, accepted = unpack(ARGV, 7 * i - 4, 7 * i + 2)
  local taken = held[i] and not gone[name]
  if taken and take_if_tokens_are_missing(worker, name, fence, before) then
    taken, gone[name] = false, true
  end
  if taken then
    local entry_id = total .. (accepted == '0' and '-0' or '-1')
    if store_entry(name, entry_id, chunks, 'a', accepted) then
      if reply_to ~= '' then
        send(reply_to, name, entry_id, chunks, accepted)
      end
      if not is_live(name) and count_watched() > 0 then
        notify_readers(split(name), name, entry_id, chunks, '')
      end
    end
  else
    lost[#lost + 1] = name
  end
end
for api in pairs(groups_of) do
  send_group(api)
end
wake_for_quarantine()
return lost
