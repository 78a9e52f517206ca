#!lua flags=allow-oom
-- Forget everything that is not in the ledger, because the server has deleted groups that the trainer's checkpoint lacks (an
-- older checkpoint is used). The feeder starts again at its first prompt, and counts those that the ledger has. Dead letters
-- stay.
-- ARGV: fencing token, length of the ledger
-- The feeder waits until `recover` has set the ledger's length again.
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
for _, stage in ipairs({'prompts', 'groups', 'scored'}) do delete_entries(stage) end
for _, name in ipairs({'scored:marked', 'scored:counted', 'inflight_versions', 'unpublished', 'unfinished'}) do
  redis.call('UNLINK', key(name))
end
redis.call('HDEL', key('feed'), 'cursor', 'before', 'added', 'done')
for _, name in ipairs(redis.call('HKEYS', key('counts'))) do
  if name == 'trained' or string.sub(name, 1, 8) == 'dropped:' then redis.call('HDEL', key('counts'), name) end
end
local dead, operator = redis.call('HLEN', key('dead_prompts')), redis.call('SCARD', key('dropped_dead'))
redis.call('HSET', key('counts'), 'dead', dead, 'dropped:operator', operator, 'fed', dead + operator)
redis.call('HSET', key('policy'), 'acknowledged', ARGV[2], 'acknowledged_by', ARGV[1])
redis.call('HDEL', key('policy'), 'ledger')
redis.call('HDEL', key('meta'), 'finished')
wake()
return 1
