-- Put before every script, behind its first line. One script is one atomic step.
--
-- That first line says how it behaves where the server is out of memory: what adds payloads (feed, settle) is refused
-- before it has begun, and waits; what renews, marks or removes (allow-oom) goes through, or memory would never be freed.
--
-- KEYS[1] is the run's prefix, `{NAME}`. The braces keep all keys of a run in one slot of a cluster, so a script may make
-- the names of the others itself. For each stage S of prompts, groups, scored:
--   {NAME}:S            stream, consumer group `penstock`; an entry is `prompt` (id) and `payload` (record)
--   {NAME}:S:leases     zset, entry id -> ms at which the lease of its owner runs out
--   {NAME}:S:retries    zset, entry id -> ms before which nobody may take it again (owned by consumer `released`)
--   {NAME}:S:attempts   hash, `ID:infra` and `ID:data` -> failures so far; of prompts also `ID:late` -> how long in ms
--                       each attempt had run that was cancelled for its age: `1200` or `1200,3400`
--   {NAME}:S:kept:ID    hash, index -> record: finished completions of an entry's unfinished group (`rollout.partial`)
--   {NAME}:S:rate       hash, second modulo 60 -> second * 1e6 + entries settled in it
-- S may also be eval:prompts or eval:groups, the stages of an evaluation: their entries bear its policy version in a field
-- `version`, count in nothing of the run, and are emptied as a whole when the next one begins.
-- and for the run:
--   {NAME}:scored:ended hash, entry id -> prompt id: marked, not yet acknowledged (owned by consumer `trained`)
--   {NAME}:started      zset, prompt id -> policy version at its last claim: of groups outstanding, but for those that come
--                       again after they had ended (a trainer resumed, a dead letter revived): nobody knows it of these
--   {NAME}:places       zset, entry id -> policy version that gives the place of this trained group back
--   {NAME}:open         hash, id of each prompt without an end -> `STAGE:ENTRY` that is to bring it to one. Another entry
--                       of that name, a second copy or junk, ends nothing when it dies
--   {NAME}:counts       hash, fed, trained, dropped:REASON, dead, duplicates, junk; cancelled (attempts, not prompts)
--   {NAME}:dead         stream of dead letters
--   {NAME}:removed      set, ids of prompts whose dead letters the operator dropped
--   {NAME}:feed         hash, the feeder's cursor and `done`
--   {NAME}:policy       hash, version, path, step, next, fence, owner, owner_until, ledger (bytes, when the trainer began)
--   {NAME}:server       hash, `id` (the server's run id), `until` (ms before which no trainer's hold runs out, since it
--                       came back): a key of its own, for whoever of the workers finds out writes it
--   {NAME}:meta         hash, what the run is, `finished`; `paused` (by whom) and
--                       `paused_ms` while it is; `stop` (the last request to stop, a number that grows) and `stop_by`
--   {NAME}:latest       hash, the last step's metrics, for people
--   {NAME}:wake         stream of one entry: whoever waits, waits on it
--   {NAME}:engines      stream of one entry, the operator's list of engines: URL -> `WORD MS BY`, the last word on it (add or
--                       remove), when that was said, and who said it
--   {NAME}:published    stream of one entry, the policy version: whoever must hear of each one at once, waits on it
-- and for evaluation:
--   {NAME}:eval         hash, `of` (which settings the set below was made by), `data` (its fingerprint), `prompts` (how many);
--                       of the evaluation under way, or the last one: `version`, `step`, `total`, `over` once it is; `latest`
--                       (JSON): the last result
--   {NAME}:eval:set     hash, prompt id -> record: the held-out prompts
--   {NAME}:eval:open    hash, id of each prompt without an outcome in it -> `STAGE:ENTRY`, as in `open`
--   {NAME}:eval:outcomes hash, prompt id -> outcome (JSON)

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

local function is_evaluation(stage) return string.sub(stage, 1, 5) == 'eval:' end

-- Where the prompts of a stage are that have met no end.
local function open_of(stage) return key(is_evaluation(stage) and 'eval:open' or 'open') end

-- Open a prompt, or say that another entry carries it on.
local function carry(prompt, stage, id) redis.call('HSET', open_of(stage), prompt, stage .. ':' .. id) end

local function carries(prompt, stage, id) return redis.call('HGET', open_of(stage), prompt) == stage .. ':' .. id end

local function attempts(stage, id, kind)
  return tonumber(redis.call('HGET', key(stage .. ':attempts'), id .. ':' .. kind) or 0)
end

-- Numbers are written out: Lua's own way turns round ones into 1e+15, which is no integer to Redis.
local function whole(number) return string.format('%.0f', number) end

-- Let the next try of an entry begin from nothing.
local function drop_kept(stage, id) redis.call('UNLINK', key(stage .. ':kept:' .. id)) end

-- Remove an entry and all that was noted of it.
local function forget(stage, id)
  redis.call('XACK', key(stage), GROUP, id)
  redis.call('XDEL', key(stage), id)
  redis.call('ZREM', key(stage .. ':leases'), id)
  redis.call('ZREM', key(stage .. ':retries'), id)
  redis.call('HDEL', key(stage .. ':attempts'), id .. ':infra', id .. ':data', id .. ':late')
  drop_kept(stage, id)
end

-- The policy version that a prompt begins with when it is claimed now. Before the first is published, that one: nothing is
-- sampled without it.
local function version_now() return math.max(0, tonumber(redis.call('HGET', key('policy'), 'version') or 0)) end

local function begin(prompt) redis.call('ZADD', key('started'), version_now(), prompt) end

local function no_longer_begun(prompt) redis.call('ZREM', key('started'), prompt) end

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

-- The last request to stop; 0 where nobody ever made one.
local function last_stop() return tonumber(redis.call('HGET', key('meta'), 'stop') or 0) end

local function is_paused() return redis.call('HEXISTS', key('meta'), 'paused') == 1 end

-- Whether the caller is the run's trainer. Tokens only grow: a smaller one on the server means that it lost its last
-- writes, a larger one that somebody has taken over.
local function is_trainer(token)
  local fence = redis.call('HGET', key('policy'), 'fence')
  if not fence then error({err = 'NOGROUP the run has no trainer'}) end
  if fence == token then return true end
  if tonumber(fence) > tonumber(token) then return false end
  redis.call('HSET', key('policy'), 'fence', token)
  return true
end

-- While a server is away nobody can renew. So all leases, the trainer's too, start anew when it is found to be another
-- process than the one they were given by. Returns whether it was.
local function came_back(lease_ms)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local known = redis.call('HGET', key('server'), 'id')
  if known == server then return false end
  local until_ms = now_ms() + lease_ms
  redis.call('HSET', key('server'), 'id', server, 'until', whole(known and until_ms or 0))
  if not known then return false end
  for _, stage in ipairs({'prompts', 'groups', 'scored', 'eval:prompts', 'eval:groups'}) do
    for _, id in ipairs(redis.call('ZRANGE', key(stage .. ':leases'), 0, -1)) do
      redis.call('ZADD', key(stage .. ':leases'), 'GT', until_ms, id)
    end
  end
  return true
end

-- Move an entry to the dead letters, payload and all. Of foreign junk with very many fields, the first hundred: there is
-- a limit to what `unpack` can hand on.
local function bury(stage, id, reason, message)
  local flat = fields(stage, id)
  if flat then
    local prompt = field(flat, 'prompt') or ''
    local fed = carries(prompt, stage, id) and redis.call('HDEL', open_of(stage), prompt) or 0
    if not is_evaluation(stage) then
      if fed == 1 then no_longer_begun(prompt) end
      redis.call('HINCRBY', key('counts'), fed == 1 and 'dead' or 'junk', 1)
    end
    local letter = {
      'stage', stage, 'prompt', prompt, 'reason', reason, 'error', message, 'fed', fed, 'entry', id,
      'infra', attempts(stage, id, 'infra'), 'data', attempts(stage, id, 'data'),
    }
    for i = 1, math.min(#flat, 200), 2 do
      letter[#letter + 1] = 'f:' .. flat[i]
      letter[#letter + 1] = flat[i + 1]
    end
    redis.call('XADD', key('dead'), '*', unpack(letter))
  end
  forget(stage, id)
end

-- Groups outstanding: claimed, waiting to be scored, waiting to be trained, trained for a version yet to be published.
local function outstanding()
  return redis.call('ZCARD', key('prompts:leases')) + redis.call('XLEN', key('groups')) + redis.call('XLEN', key('scored'))
    - redis.call('HLEN', key('scored:ended')) + redis.call('ZCARD', key('places'))
end

-- Forget the evaluation that was under way; whoever works on an entry of it has lost its lease.
local function clear_evaluation()
  for _, stage in ipairs({'eval:prompts', 'eval:groups'}) do
    for _, part in ipairs({'', ':leases', ':retries', ':attempts'}) do redis.call('UNLINK', key(stage .. part)) end
    redis.call('XGROUP', 'CREATE', key(stage), GROUP, '0', 'MKSTREAM')
  end
  redis.call('UNLINK', key('eval:open'))
  redis.call('UNLINK', key('eval:outcomes'))
end

-- Count one settled entry in the ring of the last 60 seconds.
local function tick(stage, now, n)
  local second = math.floor(now / 1000)
  local rate, slot = key(stage .. ':rate'), second % 60
  local seen = tonumber(redis.call('HGET', rate, slot) or 0)
  if math.floor(seen / 1000000) ~= second then seen = second * 1000000 end
  redis.call('HSET', rate, slot, whole(seen + n))
end
