#!lua
-- Note a sandbox before it is created, if this consumer still owns the entry. Can be repeated.
-- ARGV: place, provider, stage, consumer, id, name of the sandbox, record (JSON: entry, stage, prompt, index, purpose, spec),
--       ms after which it ends by itself
-- Returns ms at which it was noted, or 0 if the lease was lost.
local records = key('sandboxes:' .. ARGV[1])
if owner(ARGV[3], ARGV[5]) ~= ARGV[4] then return 0 end
local known = redis.call('HGET', records, ARGV[6])
if known then return cjson.decode(known).begun_ms end
local now = now_ms()
local record = cjson.decode(ARGV[7])
record.owner, record.fence, record.begun_ms, record.until_ms = ARGV[4], 1, now, now + ARGV[8]
redis.call('HSET', records, ARGV[6], cjson.encode(record))
redis.call('HSET', key('sandbox_places'), ARGV[1], ARGV[2])
redis.call('HINCRBY', key('sandbox_counts'), 'begun', 1)
if redis.call('HLEN', records) == 1 then wake() end -- a reaper sleeps while there are none
return now
