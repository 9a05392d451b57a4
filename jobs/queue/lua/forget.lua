#!lua flags=allow-oom
-- Removes the streams of live calls that ended, which were read and which no client can ask for.
-- ARGV: names
-- Returns 1.

for _, name in ipairs(ARGV) do
  forget_stream(name)
end
return 1
