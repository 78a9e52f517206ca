#!lua flags=allow-oom
-- Give back everything that a worker had claimed whose process has ended, and count its death for each entry.
-- ARGV: `-HOST-PID-`, which the worker's consumer name contains; failure limit; how the process ended, for people
-- Returns {stage, prompt id, deaths in a row, 1 if this one was charged to the entry, 1 if the entry became a dead letter,
--         what the worker ran if it was charged} for each entry for which the death counts.
local now, released = now_ms(), {}
for _, stage in ipairs({'prompts', 'groups', 'scored', 'eval:prompts', 'eval:groups'}) do
  local pending = redis.pcall('XPENDING', key(stage), GROUP)
  for _, each in ipairs(not pending.err and pending[4] or {}) do
    if string.find(each[1], ARGV[1], 1, true) then
      for _, entry in ipairs(redis.call('XPENDING', key(stage), GROUP, '-', '+', each[2], each[1])) do
        local id = entry[1]
        local prompt = field(fields(stage, id) or {}, 'prompt') or ''
        local deaths, ran, is_dead = count_death(stage, id, tonumber(ARGV[2]), ARGV[3])
        if not is_dead then
          if stage == 'prompts' then clear_inflight_version(prompt) end
          requeue(stage, id, now)
        end
        if deaths > 0 then
          released[#released + 1] = {stage, prompt, deaths, ran and 1 or 0, is_dead and 1 or 0, ran or ''}
        end
      end
    end
  end
end
-- Its sandboxes are lost from now on; the reaper need not find that out first.
local places = redis.call('HKEYS', key('sandbox_places'))
for _, place in ipairs(places) do
  local reaper = key('sandbox_reaper:' .. place)
  if string.find(redis.call('GET', reaper) or '', ARGV[1], 1, true) then redis.call('DEL', reaper) end
  local records = key('sandboxes:' .. place)
  local flat = redis.call('HGETALL', records)
  for i = 1, #flat, 2 do
    local record = cjson.decode(flat[i + 1])
    if string.find(record.owner, ARGV[1], 1, true) and not record.lost_ms then
      record.lost_ms = now
      redis.call('HSET', records, flat[i], cjson.encode(record))
    end
  end
end
wake()
return released
