#!lua flags=allow-oom
-- Give an entry back, to be taken by anybody after a back-off; or bury it, where a budget is exhausted.
-- ARGV: stage, consumer, id, kind (infra, data, none), limit of that budget, delay_ms, error
-- Returns 0 lease lost, 1 given back, 2 buried.
local stage, id, kind = ARGV[1], ARGV[3], ARGV[4]
if owner(stage, id) ~= ARGV[2] then return 0 end
if kind ~= 'none' then
  local failures = redis.call('HINCRBY', key(stage .. ':attempts'), id .. ':' .. kind, 1)
  if failures >= tonumber(ARGV[5]) then
    bury(stage, id, kind, ARGV[7])
    wake()
    return 2
  end
end
put_aside(stage, id, now_ms() + ARGV[6])
wake()
return 1
