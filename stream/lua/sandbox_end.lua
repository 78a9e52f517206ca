#!lua flags=allow-oom
-- Delete the record of a sandbox that is gone, and count how it ended.
-- ARGV: place, name of the sandbox, how: `stopped` (by its owner), `reaped` (its owner had lost it), `stray` (it had no
--       record, and is counted as begun here), or `due` (nothing ended: the reaper must remove it)
-- Returns 1, or 0 if there is nothing to count: a script before this one did, or a stray has a record.
local records, counts, how = key('sandboxes:' .. ARGV[1]), key('sandbox_counts'), ARGV[3]
local known = redis.call('HGET', records, ARGV[2])
if how == 'stray' then
  if known then return 0 end
  redis.call('HINCRBY', counts, 'begun', 1)
elseif not known then
  return 0
elseif how == 'due' then
  local record = cjson.decode(known)
  record.is_due = true
  redis.call('HSET', records, ARGV[2], cjson.encode(record))
  return 1
end
redis.call('HDEL', records, ARGV[2])
redis.call('HINCRBY', counts, 'ended:' .. how, 1)
return 1
