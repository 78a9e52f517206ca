#!lua flags=allow-oom
-- Claim entries of a stage, or return what to wait for. Never blocks.
-- ARGV: stage, consumer, count, lease_ms, infra_limit, capacity (outstanding groups allowed; -1: no limit),
--       number of the last stop request to ignore
-- Returns {last id of wake, ms until the next lease or retry is due (-1: none), finish reason, unfinished prompts, feed done,
--          policy version (-1: none yet), {{id, infra, data, deaths, stale, flat fields, 1 if turns or completions are saved},
--          ...}, last stop request, 1 if paused}
-- While the run is paused no prompts are returned, not even those with an expired lease; other stages continue, those of an
-- evaluation too. A process that was asked to stop gets nothing. Unfinished prompts are those of the stage's own flow.
-- If the reply is lost, the claimed entries are delivered again when their lease expires.
local stage, consumer, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease_ms, infra_limit, capacity = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local stop, paused = last_stop(), is_paused()
local stream, leases, retries = key(stage), key(stage .. ':leases'), key(stage .. ':retries')
local now = now_ms()
local claimed = {}

local closed = stop > tonumber(ARGV[7]) or (paused and stage == 'prompts')
if closed then count = 0 end

local function take(id)
  local flat = fields(stage, id)
  if not flat then -- deleted meanwhile
    delete_entry(stage, id)
    return wake()
  end
  assign(stage, id, consumer)
  set_lease(stage, id, now + lease_ms)
  if stage == 'prompts' then set_inflight_version(field(flat, 'prompt') or '') end
  claimed[#claimed + 1] = {
    id, failures(stage, id, 'infra'), failures(stage, id, 'data'), failures(stage, id, 'deaths'),
    redis.call('HGET', key(stage .. ':attempts'), id .. ':stale') or '', flat,
    redis.call('EXISTS', key(stage .. ':partials:' .. id), key(stage .. ':turns:' .. id)) > 0 and 1 or 0,
  }
end

if redis.call('EXISTS', key('server')) == 0 then extend_after_restart(lease_ms) end

-- Take over entries whose lease expired because their worker died or stopped responding. Their groups are outstanding
-- already, so they may be claimed even if there is no free capacity.
local function reclaim_expired()
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, count)
  if #expired == 0 or extend_after_restart(lease_ms) then return end
  for _, id in ipairs(expired) do
    local _, _, is_dead = count_death(stage, id, infra_limit, '')
    if is_dead then wake() else take(id) end
  end
end
-- A lease or a delay that lies further ahead than any that was ever given is from before the clock stepped back.
local function bound(zset, name, longest)
  local known = tonumber(redis.call('HGET', key('server'), name) or 0)
  if known < longest then redis.call('HSET', key('server'), name, integer(longest)) else longest = known end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', zset, integer(now + longest + 1), '+inf')) do
    redis.call('ZADD', zset, integer(now + longest), id)
  end
end
bound(leases, 'lease_ms', lease_ms)
bound(retries, 'delay_ms', 0)
reclaim_expired()

local free = math.huge
if capacity >= 0 then free = capacity - outstanding() end
-- While groups under way can complete, no prompt is started that could take the memory they need.
if stage == 'prompts' and free > 0 and redis.call('ZCARD', leases) + redis.call('XLEN', key('groups')) > 0
    and memory_exceeds(0.8, 0) then
  free = 0
end
local before = #claimed
local function remaining() return math.min(count - #claimed, free - (#claimed - before)) end

if remaining() > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', retries, '-inf', now, 'LIMIT', 0, remaining())) do take(id) end
end
if remaining() > 0 then
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', remaining(), 'STREAMS', stream, '>')
  for _, entry in ipairs(fresh and fresh[1][2] or {}) do
    redis.call('ZADD', leases, now + lease_ms, entry[1])
    if stage == 'prompts' then set_inflight_version(field(entry[2], 'prompt') or '') end
    claimed[#claimed + 1] = {entry[1], 0, 0, 0, '', entry[2], 0}
  end
end
-- A feeder waits for space in the backlog, and a trainer for groups that are started again.
if stage == 'prompts' and #claimed > 0 then wake() end

local due = -1
local function note_due(zset)
  local first = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  if first[2] and (due < 0 or first[2] - now < due) then due = math.max(0, first[2] - now) end
end
-- `resume` wakes a worker that may not claim now.
if not closed then note_due(leases) end
-- Without free capacity a due retry cannot be claimed; the script that frees capacity wakes the worker.
if not closed and free - (#claimed - before) > 0 then note_due(retries) end
return {
  wake_id(), due, redis.call('HGET', key('meta'), 'finished') or '',
  redis.call('HLEN', unfinished_key(stage)), redis.call('HGET', key('feed'), 'done') or '',
  tonumber(redis.call('HGET', key('policy'), 'version') or -1), claimed, stop, paused and 1 or 0,
}
