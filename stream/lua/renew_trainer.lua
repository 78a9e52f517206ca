#!lua flags=allow-oom
-- Renew the trainer's lease on the run, or give it up (lease_ms 0).
-- ARGV: fencing token, lease_ms
-- Returns {1, last stop request, policy version (-1: none yet), 1 if this trainer's recovery is not lost} · {0} if another
--         trainer has taken over.
if not is_trainer(ARGV[1]) then return {0} end
redis.call('HSET', key('policy'), 'owner_until', integer(now_ms() + ARGV[2]))
if ARGV[2] == '0' then redis.call('HDEL', key('policy'), 'owner') end
return {1, last_stop(), tonumber(redis.call('HGET', key('policy'), 'version') or -1),
  redis.call('HGET', key('policy'), 'recovered') == ARGV[1] and 1 or 0}
