#!lua flags=allow-oom
-- The run has ended: whoever waits for work may go home, and nothing is left to pause.
-- ARGV: fencing token, why
if not is_trainer(ARGV[1]) then return 0 end
redis.call('HSET', key('meta'), 'finished', ARGV[2])
redis.call('HDEL', key('meta'), 'paused', 'paused_ms')
wake()
return 1
