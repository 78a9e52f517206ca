#!lua flags=allow-oom
-- Find the sandboxes of one place that nobody owns any more. Only one worker does this in a place at a time.
-- ARGV: place, worker, ms for which it may do this alone, ms of grace, lease_ms, how many to return
-- A sandbox is lost when its owner does not own its entry, or its lease has expired. It is due after the grace, so that
-- another worker can adopt it until then; at once, if the run has finished, its time is up, or its owner said so. What is
-- due cannot be adopted.
-- Returns {1 (0: another worker does this now), last id of wake, records of this place, now, {name, record}...}
local reaper = key('sandbox_reaper:' .. ARGV[1])
local active = redis.call('GET', reaper)
local records, now = key('sandboxes:' .. ARGV[1]), now_ms()
if active and active ~= ARGV[2] then return {0, wake_id(), redis.call('HLEN', records), now} end
redis.call('SET', reaper, ARGV[2], 'PX', ARGV[3])
local flat = redis.call('HGETALL', records)
local grace = redis.call('HEXISTS', key('meta'), 'finished') == 1 and 0 or tonumber(ARGV[4])

-- ms at which the owner lost it, or nil
local function lost_at(record)
  if owner(record.stage, record.entry) ~= record.owner then return record.lost_ms or now end
  local expires = tonumber(redis.call('ZSCORE', key(record.stage .. ':leases'), record.entry) or 0)
  if expires > now or extend_after_restart(tonumber(ARGV[5])) then return nil end
  return record.lost_ms or math.max(expires, record.begun_ms)
end

local due = {}
for i = 1, #flat, 2 do
  local record = cjson.decode(flat[i + 1])
  if not record.is_due then
    local lost = lost_at(record)
    if lost then lost = math.min(lost, now) end -- the clock may have stepped back
    local is_due = now >= record.until_ms or (lost ~= nil and now >= lost + grace)
    if is_due or lost ~= record.lost_ms then
      record.lost_ms, record.is_due = lost, is_due or nil
      flat[i + 1] = cjson.encode(record)
      redis.call('HSET', records, flat[i], flat[i + 1])
    end
  end
  if record.is_due then due[#due + 1] = {flat[i], record} end
end
-- Those first that were tried least: what cannot be removed yet must not hold up the others.
table.sort(due, function(a, b) return (a[2].tries or 0) < (b[2].tries or 0) end)
local answer = {1, wake_id(), #flat / 2, now}
for i = 1, math.min(#due, tonumber(ARGV[6])) do
  local name, record = due[i][1], due[i][2]
  record.tries = (record.tries or 0) + 1
  answer[#answer + 1] = {name, cjson.encode(record)}
  redis.call('HSET', records, name, cjson.encode(record))
end
return answer
