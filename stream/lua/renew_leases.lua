#!lua flags=allow-oom
-- Renew the leases that a consumer still owns.
-- ARGV: stage, consumer, lease_ms, id...
-- Returns {ids whose lease it has lost, last stop request}.
local stage, consumer, until_ms = ARGV[1], ARGV[2], now_ms() + ARGV[3]
local lost = {}
for i = 4, #ARGV do
  if owner(stage, ARGV[i]) == consumer then
    redis.call('ZADD', key(stage .. ':leases'), until_ms, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return {lost, last_stop()}
