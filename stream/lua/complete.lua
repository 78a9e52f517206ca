#!lua
-- Add the output to the next stage and delete the input, if this consumer still owns the entry.
-- ARGV: stage, consumer, id, next stage, prompt id, payload
-- Returns 1, or 0 if the lease was lost.
local stage, id, next_stage = ARGV[1], ARGV[3], ARGV[4]
if owner(stage, id) ~= ARGV[2] then return 0 end
local output = redis.call('XADD', key(next_stage), '*', 'prompt', ARGV[5], 'payload', ARGV[6])
if is_current(ARGV[5], stage, id) then set_current(ARGV[5], next_stage, output) end
delete_entry(stage, id)
count_completed(stage, 1)
wake()
return 1
