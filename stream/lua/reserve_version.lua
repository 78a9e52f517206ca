#!lua flags=allow-oom
-- Reserve a policy version number that was never used: above every number that the server or the caller knows.
-- ARGV: fencing token, highest number known to the caller
-- Returns the number, or -1 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return -1 end
local policy = key('policy')
-- A server that lost the reservation may still get the publication; so the published version counts, too.
local known = math.max(tonumber(redis.call('HGET', policy, 'next') or -1),
  tonumber(redis.call('HGET', policy, 'version') or -1), tonumber(ARGV[2]))
redis.call('HSET', policy, 'next', integer(known + 1))
return known + 1
