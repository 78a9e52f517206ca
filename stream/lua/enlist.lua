-- Become the trainer of the run: take the fence, unless a living trainer holds it.
-- ARGV: owner, lease_ms, owner known to be dead ('' if none)
-- Returns {token} · {0, owner, ms until its lease runs out}.
local policy, now = key('policy'), now_ms()
local holder = redis.call('HGET', policy, 'owner') or ''
local until_ms = tonumber(redis.call('HGET', policy, 'owner_until') or 0)
if holder ~= '' and holder ~= ARGV[1] and holder ~= ARGV[3] and until_ms > now then return {0, holder, until_ms - now} end
local token = redis.call('HINCRBY', policy, 'fence', 1)
redis.call('HSET', policy, 'owner', ARGV[1], 'owner_until', now + ARGV[2])
return {token}
