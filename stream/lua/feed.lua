#!lua
-- Add prompts to the backlog and move the feeder's cursor.
-- ARGV: backlog limit, cursor before, cursor after, prompts left out because they have ended (they count as fed), then
--       prompt id, payload, ...
-- Returns {1, added} · {0, last id of wake} if the backlog is full or the run is paused · {-2, last id of wake} if the prompts
--         would leave too little memory for groups · {-1, cursor} if the cursor is not the expected one; each followed by the
--         last stop request.
-- An empty backlog accepts a batch of any size, so a limit below the batch size does not stop the feeder. Prompts use at most
-- half of the server's memory while others wait, and never the last tenth while groups are outstanding.
local stop = last_stop()
local feed = redis.call('HMGET', key('feed'), 'cursor', 'before', 'added')
local cursor = feed[1] or ''
if cursor ~= ARGV[2] then
  -- This batch was fed already, and the reply was lost.
  if cursor == ARGV[3] and feed[2] == ARGV[2] then return {1, tonumber(feed[3]), stop} end
  return {-1, cursor, stop}
end
local coming = (#ARGV - 4) / 2
local waiting = redis.call('XLEN', key('prompts')) - redis.call('ZCARD', key('prompts:leases'))
if is_paused() or (coming > 0 and waiting > 0 and waiting + coming > tonumber(ARGV[1])) then return {0, wake_id(), stop} end
local bytes = 0
for i = 6, #ARGV, 2 do bytes = bytes + #ARGV[i] end
local unfinished = redis.call('HLEN', key('unfinished'))
if coming > 0 and unfinished > 0 and memory_exceeds(waiting > 0 and 0.5 or 0.9, bytes) then return {-2, wake_id(), stop} end
local added = 0
for i = 5, #ARGV, 2 do
  if redis.call('HEXISTS', key('unfinished'), ARGV[i]) == 0 then
    set_current(ARGV[i], 'prompts', redis.call('XADD', key('prompts'), '*', 'prompt', ARGV[i], 'payload', ARGV[i + 1]))
    added = added + 1
  end
end
redis.call('HSET', key('feed'), 'cursor', ARGV[3], 'before', ARGV[2], 'added', integer(added))
redis.call('HINCRBY', key('counts'), 'fed', integer(added + ARGV[4]))
wake()
return {1, added, stop}
