-- Add prompts to the backlog and move the feeder's cursor, in one step.
-- ARGV: backlog limit, cursor before, cursor after, then prompt id, payload, ...
-- Returns {1, added} · {0, last id of wake} where the backlog is full · {-1, cursor} where the cursor is another one.
-- The first batch is taken whatever its size, so that a limit below the batch size does not stop the feeder.
local before = redis.call('HGET', key('feed'), 'cursor') or ''
if before ~= ARGV[2] then return {-1, before} end
local waiting = redis.call('XLEN', key('prompts')) - redis.call('ZCARD', key('prompts:leases'))
if waiting > 0 and waiting + (#ARGV - 3) / 2 > tonumber(ARGV[1]) then
  local last = redis.call('XREVRANGE', key('wake'), '+', '-', 'COUNT', 1)
  return {0, last[1] and last[1][1] or '0-0'}
end
local added = 0
for i = 4, #ARGV, 2 do
  if redis.call('SADD', key('open'), ARGV[i]) == 1 then
    redis.call('XADD', key('prompts'), '*', 'prompt', ARGV[i], 'payload', ARGV[i + 1])
    added = added + 1
  end
end
redis.call('HSET', key('feed'), 'cursor', ARGV[3])
redis.call('HINCRBY', key('counts'), 'fed', added)
wake()
return {1, added}
