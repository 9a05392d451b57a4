#!lua flags=allow-oom
-- Sets the queue's id, unless it has one.
-- ARGV: id
-- Returns the id in effect.

redis.call('SETNX', key.QUEUE_ID, ARGV[1])
return redis.call('GET', key.QUEUE_ID)
