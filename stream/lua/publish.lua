#!lua flags=allow-oom
-- The engines have a policy version: rollouts may count on it, and the places of the groups it holds are given back.
-- ARGV: fencing token, version, path, step, metrics (JSON)
-- Returns 1, or 0 where another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
redis.call('HSET', key('policy'), 'version', ARGV[2], 'path', ARGV[3], 'step', ARGV[4])
redis.call('ZREMRANGEBYSCORE', key('places'), '-inf', ARGV[2])
redis.call('HSET', key('latest'), 'metrics', ARGV[5])
wake()
return 1
