#!lua flags=allow-oom
-- Removes the streams of ended live calls, once they were read and no client can request them.
-- ARGV: names
-- Returns 1.

for _, name in ipairs(ARGV) do
  forget_stream(name)
end
return 1
