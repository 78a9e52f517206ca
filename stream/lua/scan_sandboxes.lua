#!lua flags=no-writes
-- Read all sandboxes of the run that are not known to be gone, at one moment. Writes nothing.
-- Returns {now, 1 if the run has finished, flat counts, {place, provider, {name, record, ms at which its lease ends (0: its
-- owner does not own the entry)}...}...}
local now = now_ms()
local places = redis.call('HGETALL', key('sandbox_places'))
local found = {now, redis.call('HEXISTS', key('meta'), 'finished'), redis.call('HGETALL', key('sandbox_counts'))}
for i = 1, #places, 2 do
  local flat, place = redis.call('HGETALL', key('sandboxes:' .. places[i])), {places[i], places[i + 1]}
  for j = 1, #flat, 2 do
    local record, ends = cjson.decode(flat[j + 1]), 0
    if owner(record.stage, record.entry) == record.owner then
      ends = tonumber(redis.call('ZSCORE', key(record.stage .. ':leases'), record.entry) or 0)
    end
    place[#place + 1] = {flat[j], flat[j + 1], ends}
  end
  found[#found + 1] = place
end
return found
