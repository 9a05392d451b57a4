#!lua flags=allow-oom
-- Ends requests without a result, waiting or running, and notifies the workers that run them.
-- ARGV: 'requests', 0, names of live calls...   or   'batch', limit, batch
-- Returns how many lines of the batch may be left (0: none); for requests always 0.

if ARGV[1] == 'requests' then
  for i = 3, #ARGV do
    cancel_live(ARGV[i])
  end
  return 0
end

return drop_unfinished(ARGV[3], tonumber(ARGV[2])) and 1 or 0
