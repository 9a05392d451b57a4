#!lua flags=allow-oom
-- Gives this queue an id unless it has one.
-- ARGV: id
-- Returns the id that it has.

redis.call('SETNX', key.QUEUE_ID, ARGV[1])
return redis.call('GET', key.QUEUE_ID)
