#!lua flags=allow-oom
-- Make the consumer that owns an entry now the owner of a sandbox of that entry. Can be repeated: the fence only grows.
-- ARGV: place, name of the sandbox, stage, consumer, id
-- Returns the new fence, or 0 if the lease was lost, or the sandbox is removed or about to be.
local records = key('sandboxes:' .. ARGV[1])
local known = redis.call('HGET', records, ARGV[2])
if not known or owner(ARGV[3], ARGV[5]) ~= ARGV[4] then return 0 end
local record = cjson.decode(known)
if record.is_due or record.stage ~= ARGV[3] or record.entry ~= ARGV[5] then return 0 end
if record.owner ~= ARGV[4] then redis.call('HINCRBY', key('sandbox_counts'), 'adopted', 1) end
record.owner, record.fence, record.lost_ms = ARGV[4], record.fence + 1, nil
redis.call('HSET', records, ARGV[2], cjson.encode(record))
return record.fence
