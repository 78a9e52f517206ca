#!lua flags=allow-oom
-- Pause, resume or stop the run. Blocked processes are woken and see the command in the answer of their next script.
-- ARGV: command (pause, resume, stop), by whom
-- Returns {1, 1 if a trainer holds the run} · {0, by, ms} paused already, or not paused · {-1, reason} the run has finished ·
--          {-2} no such run.
-- A pause outlives every process. It ends with `resume`, or with the run.
-- A stop request is a number that only grows, meant for processes connected when it was made: each process remembers the
-- number that it found when it connected (`RunConnection.ignore_earlier_stops`). So a request is never withdrawn, and never
-- stops a process that is started later.
local meta, command, now = key('meta'), ARGV[1], now_ms()
if redis.call('EXISTS', key('prompts')) == 0 then return {-2} end
local finished = redis.call('HGET', meta, 'finished')
if finished then return {-1, finished} end
local paused = redis.call('HMGET', meta, 'paused', 'paused_ms')
if command == 'pause' then
  if paused[1] then return {0, paused[1], paused[2]} end
  redis.call('HSET', meta, 'paused', ARGV[2], 'paused_ms', integer(now))
elseif command == 'resume' then
  if not paused[1] then return {0} end
  redis.call('HDEL', meta, 'paused', 'paused_ms')
else
  local time = redis.call('TIME')
  redis.call('HSET', meta, 'stop', integer(math.max(last_stop() + 1, time[1] * 1e6 + time[2])), 'stop_by', ARGV[2])
end
wake()
local trainer = redis.call('HMGET', key('policy'), 'owner', 'owner_until')
return {1, (trainer[1] or '') ~= '' and tonumber(trainer[2] or 0) > now and 1 or 0}
