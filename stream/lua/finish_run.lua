#!lua flags=allow-oom
-- End the run: its workers exit, and a pause ends.
-- ARGV: fencing token, reason
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
redis.call('HSET', key('meta'), 'finished', ARGV[2])
redis.call('HDEL', key('meta'), 'paused', 'paused_ms')
wake()
return 1
