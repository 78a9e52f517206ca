#!lua flags=allow-oom
-- Become the trainer of the run, unless another trainer's lease is valid.
-- ARGV: owner, lease_ms, owner known to be dead ('' if none), highest token known to the caller
-- Returns {token} · {0, owner, ms until its lease expires}.
-- A token is a time in microseconds, not a count, so a server that was emptied never gives a token twice: two trainers may
-- reach one server within the same millisecond, but not within the same microsecond.
local policy, now = key('policy'), now_ms()
local holder = redis.call('HGET', policy, 'owner') or ''
if holder ~= '' and holder ~= ARGV[1] and holder ~= ARGV[3] then
  extend_after_restart(tonumber(ARGV[2]))
  local until_ms = math.max(
    tonumber(redis.call('HGET', policy, 'owner_until') or 0), tonumber(redis.call('HGET', key('server'), 'until') or 0))
  local longest = math.max(tonumber(ARGV[2]), tonumber(redis.call('HGET', policy, 'owner_lease_ms') or 0))
  if until_ms > now + longest then -- the clock stepped back
    until_ms = now + longest
    redis.call('HSET', policy, 'owner_until', integer(until_ms))
    redis.call('HSET', key('server'), 'until', integer(until_ms))
  end
  if until_ms > now then return {0, holder, until_ms - now} end
end
local time = redis.call('TIME')
local known = math.max(tonumber(redis.call('HGET', policy, 'fence') or 0), tonumber(ARGV[4]))
local token = math.max(known + 1, time[1] * 1e6 + time[2])
redis.call('HSET', policy, 'fence', integer(token), 'owner', ARGV[1], 'owner_until', integer(now + ARGV[2]),
  'owner_lease_ms', ARGV[2])
return {token}
