-- A trainer begins, from a checkpoint: what it lacks comes again, whatever a trainer before it held.
-- ARGV: fencing token, counts of ends in the ledger (JSON), then id, prompt id, ... marked ones that the ledger lacks
-- Returns 1, or 0 where another trainer has taken over.
if redis.call('HGET', key('policy'), 'fence') ~= ARGV[1] then return 0 end
local now = now_ms()
for i = 3, #ARGV, 2 do
  redis.call('ZREM', key('scored:marks'), ARGV[i])
  redis.call('SADD', key('open'), ARGV[i + 1])
  put_aside('scored', ARGV[i], now)
end
for _, id in ipairs(redis.call('ZRANGE', key('scored:leases'), 0, -1)) do put_aside('scored', id, now) end
for _, name in ipairs(redis.call('HKEYS', key('counts'))) do
  if name == 'trained' or string.sub(name, 1, 8) == 'dropped:' then
    if name ~= 'dropped:operator' then redis.call('HDEL', key('counts'), name) end
  end
end
for name, n in pairs(cjson.decode(ARGV[2])) do redis.call('HSET', key('counts'), name, n) end
redis.call('HDEL', key('meta'), 'finished')
wake()
return 1
