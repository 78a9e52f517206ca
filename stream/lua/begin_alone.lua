#!lua flags=allow-oom
-- Note that a worker works on this entry and on nothing else: if the worker dies now, the death is charged to the entry.
-- ARGV: stage, consumer, id, what the worker runs, for people
-- Returns 1, or 0 if the lease was lost.
if owner(ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
redis.call('HSET', key(ARGV[1] .. ':attempts'), ARGV[3] .. ':alone', ARGV[2] .. ' ' .. ARGV[4])
return 1
