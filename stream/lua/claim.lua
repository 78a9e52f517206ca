-- Claim entries of a stage, or say what to wait for. Never blocks.
-- ARGV: stage, consumer, count, lease_ms, infra_limit, capacity (-1: no bound; groups that may be outstanding)
-- Returns {last id of wake, ms until a lease or a back-off falls due (-1: none), finished, prompts open, feed done,
--          policy version (-1: none yet), {{id, infra, data, flat fields}, ...}}
local stage, consumer, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease_ms, infra_limit, capacity = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local stream, leases, retries = key(stage), key(stage .. ':leases'), key(stage .. ':retries')
local now = now_ms()
local taken = {}

local function take(id)
  local flat = fields(stage, id)
  if not flat then return forget(stage, id) end
  hand_over(stage, id, consumer)
  lease(stage, id, consumer, now + lease_ms)
  taken[#taken + 1] = {id, attempts(stage, id, 'infra'), attempts(stage, id, 'data'), flat}
end

-- After a restart of the server nobody could renew: every lease starts anew, once.
local function server_is_new()
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local known = redis.call('HGET', key('meta'), 'server')
  if known == server then return false end
  redis.call('HSET', key('meta'), 'server', server)
  if not known then return false end
  for _, each in ipairs({'prompts', 'groups', 'scored'}) do
    for _, id in ipairs(redis.call('ZRANGE', key(each .. ':leases'), 0, -1)) do
      redis.call('ZADD', key(each .. ':leases'), now + lease_ms, id)
    end
  end
  return true
end

local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, count)
if #expired > 0 and not server_is_new() then
  for _, id in ipairs(expired) do
    local failures = redis.call('HINCRBY', key(stage .. ':attempts'), id .. ':infra', 1)
    if failures >= infra_limit then
      bury(stage, id, 'infra', 'its workers died, or fell silent, ' .. failures .. ' times')
      wake()
    else
      take(id)
    end
  end
end

local room = count - #taken
if capacity >= 0 then room = math.min(room, capacity - outstanding()) end
if room > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', retries, '-inf', now, 'LIMIT', 0, room)) do
    take(id)
    room = room - 1
  end
end
if room > 0 then
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', room, 'STREAMS', stream, '>')
  if fresh then
    for _, entry in ipairs(fresh[1][2]) do
      redis.call('ZADD', leases, now + lease_ms, entry[1])
      taken[#taken + 1] = {entry[1], 0, 0, entry[2]}
    end
    -- Taking prompts off the backlog is what the feeder waits for.
    if stage == 'prompts' then wake() end
  end
end

local due = -1
for _, zset in ipairs({leases, retries}) do
  local first = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  if first[2] and (due < 0 or first[2] - now < due) then due = math.max(0, first[2] - now) end
end
local last = redis.call('XREVRANGE', key('wake'), '+', '-', 'COUNT', 1)
return {
  last[1] and last[1][1] or '0-0', due, redis.call('HGET', key('meta'), 'finished') or '',
  redis.call('SCARD', key('open')), redis.call('HGET', key('feed'), 'done') or '',
  tonumber(redis.call('HGET', key('policy'), 'version') or -1), taken,
}
