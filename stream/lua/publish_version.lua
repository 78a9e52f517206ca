#!lua flags=allow-oom
-- Publish a policy version that the engines have: rollout workers may use it, and the capacity of the groups trained for it
-- is freed.
-- ARGV: fencing token, version, path, step, metrics (JSON)
-- Returns 1, or 0 if another trainer has taken over.
-- A trainer publishes again if the server lost the write; a version older than the server's changes nothing.
if not is_trainer(ARGV[1]) then return 0 end
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', key('policy'), 'version') or -1) then return 1 end
redis.call('HSET', key('policy'), 'version', ARGV[2], 'path', ARGV[3], 'step', ARGV[4])
redis.call('ZREMRANGEBYSCORE', key('unpublished'), '-inf', ARGV[2])
redis.call('HSET', key('latest'), 'metrics', ARGV[5])
redis.call('XADD', key('published'), 'MAXLEN', '=', 1, '*', 'version', ARGV[2])
wake()
return 1
