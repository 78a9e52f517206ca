#!lua
-- Add prompts to the backlog and move the feeder's cursor.
-- ARGV: backlog limit, cursor before, cursor after, then prompt id, payload, outcome, ...
--       outcome: '' for a prompt to add; otherwise the prompt is only counted, as the ledger has it (a server that was
--       emptied, or that lost prompts, is fed from the beginning): `trained` · `dropped:REASON` · `dead:REASON`, which is a
--       dead letter again
-- Returns {1, added} · {0, last id of wake} if the backlog is full or the run is paused · {-2, last id of wake} if the prompts
--         would leave too little memory for groups · {-1, cursor} if the cursor is not the expected one; each followed by the
--         last stop request.
-- A prompt that the server knows is not added a second time. An empty backlog accepts a batch of any size, so a limit below
-- the batch size does not stop the feeder. Prompts use at most half of the server's memory while others wait, and never the
-- last tenth while groups are outstanding.
local stop = last_stop()
local feed = redis.call('HMGET', key('feed'), 'cursor', 'before', 'added')
local cursor = feed[1] or ''
if cursor ~= ARGV[2] then
  -- This batch was fed already, and the reply was lost.
  if cursor == ARGV[3] and feed[2] == ARGV[2] then return {1, tonumber(feed[3]), stop} end
  return {-1, cursor, stop}
end
local coming = 0
for i = 6, #ARGV, 3 do
  if ARGV[i] == '' then coming = coming + 1 end
end
local waiting = redis.call('XLEN', key('prompts')) - redis.call('ZCARD', key('prompts:leases'))
if is_paused() or (coming > 0 and waiting > 0 and waiting + coming > tonumber(ARGV[1])) then return {0, wake_id(), stop} end
local bytes = 0
for i = 5, #ARGV, 3 do bytes = bytes + #ARGV[i] end
local unfinished = redis.call('HLEN', key('unfinished'))
if coming > 0 and unfinished > 0 and memory_exceeds(waiting > 0 and 0.5 or 0.9, bytes) then return {-2, wake_id(), stop} end

local function is_known(prompt)
  return redis.call('HEXISTS', key('unfinished'), prompt) == 1 or redis.call('HEXISTS', key('dead_prompts'), prompt) == 1
    or redis.call('SISMEMBER', key('dropped_dead'), prompt) == 1
end

local added, counted = 0, 0
for i = 4, #ARGV, 3 do
  local prompt, payload, outcome = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_known(prompt) then -- fed before the server was set back
  elseif outcome == '' then
    set_current(prompt, 'prompts', redis.call('XADD', key('prompts'), '*', 'prompt', prompt, 'payload', payload))
    added = added + 1
  elseif string.sub(outcome, 1, 5) == 'dead:' then
    local letter = redis.call('XADD', key('dead'), '*', 'stage', 'prompts', 'prompt', prompt, 'reason', string.sub(outcome, 6),
      'error', 'the server lost this letter; the ledger has its reason', 'ends_prompt', '1', 'entry', '', 'infra', '0',
      'data', '0', 'f:prompt', prompt, 'f:payload', payload)
    redis.call('HSET', key('dead_prompts'), prompt, letter)
    redis.call('HINCRBY', key('counts'), 'dead', 1)
    redis.call('HINCRBY', key('counts'), 'dead_letters:' .. string.sub(outcome, 6), 1)
    counted = counted + 1
  else
    count_outcome(prompt, outcome)
    counted = counted + 1
  end
end
redis.call('HSET', key('feed'), 'cursor', ARGV[3], 'before', ARGV[2], 'added', integer(added))
redis.call('HINCRBY', key('counts'), 'fed', integer(added + counted))
wake()
return {1, added, stop}
