-- The trainer renews its hold on the run, or gives it up (lease_ms 0).
-- ARGV: fencing token, lease_ms
-- Returns 1, or 0 where another trainer has taken over.
local policy = key('policy')
if redis.call('HGET', policy, 'fence') ~= ARGV[1] then return 0 end
redis.call('HSET', policy, 'owner_until', now_ms() + ARGV[2])
return 1
