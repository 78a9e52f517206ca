#!lua flags=allow-oom
-- Give back everything that a killed worker had claimed, without counting a failure: the entries did not end the worker.
-- ARGV: `-HOST-PID-`, which the worker's consumer name contains
-- Returns the number of entries.
local now, released = now_ms(), 0
for _, stage in ipairs({'prompts', 'groups', 'scored', 'eval:prompts', 'eval:groups'}) do
  local pending = redis.pcall('XPENDING', key(stage), GROUP)
  for _, each in ipairs(not pending.err and pending[4] or {}) do
    if string.find(each[1], ARGV[1], 1, true) then
      for _, entry in ipairs(redis.call('XPENDING', key(stage), GROUP, '-', '+', each[2], each[1])) do
        if stage == 'prompts' then clear_inflight_version(field(fields(stage, entry[1]) or {}, 'prompt') or '') end
        requeue(stage, entry[1], now)
        released = released + 1
      end
    end
  end
end
if released > 0 then wake() end
return released
