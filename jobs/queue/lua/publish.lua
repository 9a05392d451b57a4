#!lua
-- Appends the next tokens to requests' token streams, which are the requests' checkpoints.
-- ARGV: worker, tokens that it generated in its life, number of this publish in its life, number of
--       its last publish that was answered; in msgpack, a list each: names, fences (text), output
--       tokens before these and with them, lengths of the chunks, API processes or '', accepted
--       ('0', '1' or the worker's fingerprint), whether earlier tokens are none or the worker's
--       own; then the chunks (msgpack) of all
-- Returns the number of this publish; the names of requests that were not written, since the worker
-- does not hold them under that fence or their streams lack earlier tokens; and (name, fence) of
-- each with such a stream.
-- An API process receives all chunks of one call as one entry, in msgpack: a list of (name, id of
-- the entry of the token stream, accepted, chunks or nil if they are large) each.

local MOST_BYTES_OF_A_GROUP = 8192
-- First bytes of values in msgpack: a text below 256 bytes, lists of any and of 4 values, nil
local STR8, ARRAY32, ARRAY_OF_4, NIL = '\217', '\221', '\148', '\192'
local char = string.char
local worker, generated, number, answered = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local names, fences, before, total, lengths, apis, accepted_by, own = unpack(cmsgpack.unpack(ARGV[5]))
local sent = 0 -- bytes of the chunks of earlier iterations
local lost, missing, lacks = {}, {}, {}
local groups_of = {} -- by API process

local function send_group(api)
  local items = groups_of[api].items
  groups_of[api] = nil
  notify_api(api, 'g', ARRAY32 .. struct.pack('>I4', #items) .. table.concat(items))
end

local function send(api, name, entry_id, chunks, accepted)
  local group = groups_of[api] or {items = {}, bytes = 0}
  groups_of[api] = group
  local item = ARRAY_OF_4 .. STR8 .. char(#name) .. name .. STR8 .. char(#entry_id) .. entry_id
    .. STR8 .. char(#accepted) .. accepted .. (#chunks <= MOST_BYTES_OF_AN_API_ENTRY and chunks or NIL)
  group.items[#group.items + 1] = item
  group.bytes = group.bytes + #item
  if group.bytes >= MOST_BYTES_OF_A_GROUP then
    send_group(api)
  end
end

-- Whether the server has every publish that was answered to the worker. Once it lacks one, this
-- stays false.
local function has_all_publishes()
  local stored = tonumber(redis.call('GET', key.published(worker)) or 0)
  if stored < answered then
    return false
  end
  redis.call('SET', key.published(worker), math.max(stored, number), 'EX', COUNTED_SECONDS)
  return true
end

count_generated(worker, generated)
local has_all, held = has_all_publishes(), which_held(worker, names, fences)
for i, name in ipairs(names) do
  local reply_to, accepted, chunks = apis[i], accepted_by[i], string.sub(ARGV[6], sent + 1, sent + lengths[i])
  sent = sent + lengths[i]
  if not held[i] or lacks[name] then
    lost[#lost + 1] = name
  elseif not (has_all and own[i]) and not reaches(name, before[i]) then
    lost[#lost + 1], lacks[name] = name, true
    missing[#missing + 1], missing[#missing + 2] = name, fences[i]
  else
    local entry_id = total[i] .. (accepted == '0' and '-0' or '-1')
    if store_entry(name, entry_id, chunks, 'a', accepted) then
      if reply_to ~= '' then
        send(reply_to, name, entry_id, chunks, accepted)
      end
      if not is_live(name) and count_watched() > 0 then
        notify_readers(split(name), name, entry_id, chunks, '')
      end
    end
  end
end
for api in pairs(groups_of) do
  send_group(api)
end
return {number, lost, missing}
