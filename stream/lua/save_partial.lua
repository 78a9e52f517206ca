#!lua
-- Save a finished completion of an unfinished group for the next attempt at its prompt. `delete_entry` deletes it.
-- ARGV: stage, consumer, id, index, payload
-- Returns 1, or 0 if the lease was lost.
if owner(ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
redis.call('HSET', key(ARGV[1] .. ':partials:' .. ARGV[3]), ARGV[4], ARGV[5])
redis.call('HDEL', key(ARGV[1] .. ':attempts'), ARGV[3] .. ':deaths') -- progress: deaths count in a row
return 1
