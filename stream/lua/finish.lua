-- The run has ended: whoever waits for work may go home.
-- ARGV: fencing token, why
if redis.call('HGET', key('policy'), 'fence') ~= ARGV[1] then return 0 end
redis.call('HSET', key('meta'), 'finished', ARGV[2])
wake()
return 1
