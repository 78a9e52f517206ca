-- Put before every script. One script is one atomic step.
--
-- KEYS[1] is the run's prefix, `{NAME}`. The braces keep all keys of a run in one slot of a cluster, so a script may make
-- the names of the others itself. For each stage S of prompts, groups, scored:
--   {NAME}:S            stream, consumer group `penstock`; an entry is `prompt` (id) and `payload` (record)
--   {NAME}:S:leases     zset, entry id -> ms at which the lease of its owner runs out
--   {NAME}:S:retries    zset, entry id -> ms before which nobody may take it again (owned by consumer `released`)
--   {NAME}:S:attempts   hash, `ID:infra` and `ID:data` -> failures so far
--   {NAME}:S:rate       hash, second modulo 60 -> second * 1e6 + entries settled in it
-- and for the run:
--   {NAME}:scored:marks zset, entry id -> policy version that gives its place back (owned by consumer `trained`)
--   {NAME}:open         set, ids of prompts without an end
--   {NAME}:counts       hash, fed, trained, dropped:REASON, dead, duplicates, junk
--   {NAME}:dead         stream of dead letters
--   {NAME}:feed         hash, the feeder's cursor and `done`
--   {NAME}:policy       hash, version, path, step, next, fence, owner, owner_until
--   {NAME}:meta         hash, what the run is, `server` (the server's run id), `finished`
--   {NAME}:latest       hash, the last step's metrics, for people
--   {NAME}:wake         stream of one entry: whoever waits, waits on it

local run = KEYS[1]
local GROUP = 'penstock'

local function key(name) return run .. ':' .. name end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function wake() redis.call('XADD', key('wake'), 'MAXLEN', '=', 1, '*', 'e', '') end

-- The consumer that owns a pending entry, or nil.
local function owner(stage, id)
  local pending = redis.call('XPENDING', key(stage), GROUP, id, id, 1)
  return pending[1] and pending[1][2]
end

-- The fields of an entry as a flat list, or nil if it is gone.
local function fields(stage, id)
  local found = redis.call('XRANGE', key(stage), id, id)
  return found[1] and found[1][2]
end

local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end

local function attempts(stage, id, kind)
  return tonumber(redis.call('HGET', key(stage .. ':attempts'), id .. ':' .. kind) or 0)
end

-- Remove an entry and all that was noted of it.
local function forget(stage, id)
  redis.call('XACK', key(stage), GROUP, id)
  redis.call('XDEL', key(stage), id)
  redis.call('ZREM', key(stage .. ':leases'), id)
  redis.call('ZREM', key(stage .. ':retries'), id)
  redis.call('HDEL', key(stage .. ':attempts'), id .. ':infra', id .. ':data')
end

-- Hand a pending entry to another consumer, real or reserved.
local function hand_over(stage, id, consumer)
  redis.call('XCLAIM', key(stage), GROUP, consumer, 0, id, 'JUSTID')
end

local function lease(stage, id, consumer, until_ms)
  redis.call('ZREM', key(stage .. ':retries'), id)
  redis.call('ZADD', key(stage .. ':leases'), until_ms, id)
end

-- Put an entry aside for anybody, not before due_ms.
local function put_aside(stage, id, due_ms)
  hand_over(stage, id, 'released')
  redis.call('ZREM', key(stage .. ':leases'), id)
  redis.call('ZADD', key(stage .. ':retries'), due_ms, id)
end

-- Move an entry to the dead letters, payload and all.
local function bury(stage, id, reason, message)
  local flat = fields(stage, id)
  if flat then
    local prompt = field(flat, 'prompt') or ''
    local fed = redis.call('SREM', key('open'), prompt)
    redis.call('HINCRBY', key('counts'), fed == 1 and 'dead' or 'junk', 1)
    local letter = {
      'stage', stage, 'prompt', prompt, 'reason', reason, 'error', message, 'fed', fed, 'entry', id,
      'infra', attempts(stage, id, 'infra'), 'data', attempts(stage, id, 'data'),
    }
    for i = 1, #flat, 2 do
      letter[#letter + 1] = 'f:' .. flat[i]
      letter[#letter + 1] = flat[i + 1]
    end
    redis.call('XADD', key('dead'), '*', unpack(letter))
  end
  forget(stage, id)
end

-- Groups outstanding: claimed, waiting to be scored, waiting to be trained; not those whose place was given back.
local function outstanding()
  local version = tonumber(redis.call('HGET', key('policy'), 'version') or -1)
  return redis.call('ZCARD', key('prompts:leases')) + redis.call('XLEN', key('groups'))
    + redis.call('XLEN', key('scored')) - redis.call('ZCOUNT', key('scored:marks'), '-inf', version)
end

-- Count one settled entry in the ring of the last 60 seconds.
local function tick(stage, now, n)
  local second = math.floor(now / 1000)
  local rate, slot = key(stage .. ':rate'), second % 60
  local seen = tonumber(redis.call('HGET', rate, slot) or 0)
  if math.floor(seen / 1000000) ~= second then seen = second * 1000000 end
  redis.call('HSET', rate, slot, string.format('%.0f', seen + n))
end
