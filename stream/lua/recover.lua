#!lua flags=allow-oom
-- Start a trainer from a checkpoint: requeue every group that the checkpoint lacks, and every group that the previous
-- trainer had leased.
-- ARGV: fencing token, length of the ledger, outcomes in it by count (JSON), n, then the ids of n unfinished prompts that
--       have an outcome in the ledger, then id, prompt id, ... of marked entries without an outcome in the ledger
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
local now = now_ms()
local first = 5 + tonumber(ARGV[4])
for i = 5, first - 1 do redis.call('HDEL', key('unfinished'), ARGV[i]) end
for i = first, #ARGV, 2 do
  redis.call('HDEL', key('scored:marked'), ARGV[i])
  redis.call('ZREM', key('unpublished'), ARGV[i])
  if ARGV[i + 1] ~= '' and redis.call('HEXISTS', key('unfinished'), ARGV[i + 1]) == 0 then
    set_current(ARGV[i + 1], 'scored', ARGV[i])
  end
  requeue('scored', ARGV[i], now)
end
for _, id in ipairs(redis.call('ZRANGE', key('scored:leases'), 0, -1)) do requeue('scored', id, now) end
for _, name in ipairs(redis.call('HKEYS', key('counts'))) do
  if name == 'trained' or string.sub(name, 1, 8) == 'dropped:' then
    if name ~= 'dropped:operator' then redis.call('HDEL', key('counts'), name) end
  end
end
for name, n in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', key('counts'), name, integer(n)) end
redis.call('HSET', key('policy'), 'ledger', ARGV[2])
redis.call('HDEL', key('meta'), 'finished')
wake()
return 1
