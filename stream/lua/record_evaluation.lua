#!lua flags=allow-oom
-- Record the result of a scored evaluation group and delete the group.
-- ARGV: stage, consumer, id, prompt id, result (JSON)
-- Returns 1, or 0 if the lease was lost.
local stage, id, prompt = ARGV[1], ARGV[3], ARGV[4]
if owner(stage, id) ~= ARGV[2] then return 0 end
if is_current(prompt, stage, id) then
  redis.call('HSET', key('eval:results'), prompt, ARGV[5])
  redis.call('HDEL', key('eval:unfinished'), prompt)
end
delete_entry(stage, id)
count_completed(stage, 1)
wake()
return 1
