#!lua flags=allow-oom
-- Start a trainer from a checkpoint: requeue every group that the checkpoint lacks, and every group that the previous
-- trainer had leased; derive the counts from the ledger.
-- ARGV: fencing token, length of the ledger, outcomes in it by count (JSON), n, then prompt id, outcome, ... of n unfinished
--       prompts that have an outcome in the ledger, then id, prompt id, ... of marked entries without one
-- Returns 1, or 0 if another trainer has taken over.
-- The lists were read before; each is checked against what the server has now.
if not is_trainer(ARGV[1]) then return 0 end
local now, counts = now_ms(), key('counts')
local first = 5 + 2 * ARGV[4]
for i = 5, first - 1, 2 do
  if redis.call('HDEL', key('unfinished'), ARGV[i]) == 1 then count_outcome(ARGV[i], ARGV[i + 1]) end
end
for i = first, #ARGV, 2 do
  local id, prompt = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', key('scored:marked'), id) == prompt then
    redis.call('HDEL', key('scored:marked'), id)
    redis.call('ZREM', key('unpublished'), id)
    local counted = redis.call('HGET', key('scored:counted'), id)
    redis.call('HDEL', key('scored:counted'), id)
    if counted then
      redis.call('HINCRBY', counts, counted, -1)
      if redis.call('HEXISTS', key('unfinished'), prompt) == 0 then set_current(prompt, 'scored', id)
      else redis.call('HINCRBY', counts, 'fed', -1) end
    end
    requeue('scored', id, now)
  end
end
for _, id in ipairs(redis.call('ZRANGE', key('scored:leases'), 0, -1)) do requeue('scored', id, now) end

local function count(name) return tonumber(redis.call('HGET', counts, name) or 0) end
local function set_count(name, n)
  if n ~= 0 then redis.call('HSET', counts, name, integer(n)) else redis.call('HDEL', counts, name) end
end
set_count('dead', redis.call('HLEN', key('dead_prompts')))
set_count('dropped:operator', redis.call('SCARD', key('dropped_dead')))
-- What trainers have ended, by the sets of prompts and by the counts.
local ended = count('fed') - redis.call('HLEN', key('unfinished')) - count('dead') - count('dropped:operator')
local counted, in_ledger, names = 0, 0, {}
for _, name in ipairs(redis.call('HKEYS', counts)) do
  if name == 'trained' or string.sub(name, 1, 8) == 'dropped:' and name ~= 'dropped:operator' then
    names[#names + 1] = name
    counted = counted + count(name)
  end
end
local recorded = cjson.decode(ARGV[3])
for _, n in pairs(recorded) do in_ledger = in_ledger + n end
if ended == in_ledger then
  for _, name in ipairs(names) do redis.call('HDEL', counts, name) end
  for name, n in pairs(recorded) do set_count(name, n) end
else
  -- The server lost writes: prompts that the ledger has are fed again, and counted when they are. Until then only
  -- prompts that the server knows are counted.
  set_count('trained', count('trained') + ended - counted)
end
redis.call('HSET', key('policy'), 'ledger', ARGV[2], 'recovered', ARGV[1])
redis.call('HDEL', key('meta'), 'finished')
wake()
return 1
