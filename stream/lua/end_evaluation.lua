#!lua flags=allow-oom
-- End the current evaluation, complete or not, and delete its entries.
-- ARGV: fencing token, the last result (JSON; '' if there is none)
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
delete_evaluation()
redis.call('HSET', key('eval'), 'finished', '1')
if ARGV[2] == '' then redis.call('HDEL', key('eval'), 'latest') else redis.call('HSET', key('eval'), 'latest', ARGV[2]) end
wake()
return 1
