#!lua flags=allow-oom
-- Add the output to the next stage and delete the input, if this consumer still owns the entry. A server without free
-- memory refuses the command before this script, which stores the output's record.
-- ARGV: stage, consumer, id, next stage, prompt id, token of the output's record in `incoming`
-- Returns 1, or 0 if the lease was lost, or -1 if the record is not there: send both again.
local stage, id, next_stage = ARGV[1], ARGV[3], ARGV[4]
local incoming = key(next_stage .. ':incoming:' .. ARGV[6])
if owner(stage, id) ~= ARGV[2] then
  redis.call('UNLINK', incoming)
  return 0
end
if redis.call('PERSIST', incoming) == 0 then return -1 end
local output = redis.call('XADD', key(next_stage), '*', 'prompt', ARGV[5])
redis.call('RENAME', incoming, payload_key(next_stage, output))
if is_current(ARGV[5], stage, id) then set_current(ARGV[5], next_stage, output) end
delete_entry(stage, id)
count_completed(stage, 1)
wake()
return 1
