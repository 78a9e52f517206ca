#!lua flags=allow-oom
-- Add the output to the next stage and delete the input, if this consumer still owns the entry. The output's record is
-- sent together with this script, and a server without free memory refuses that command before it. Or the output is the
-- input's record with scores, which are a field of the entry: then the record is renamed and only the scores are sent.
-- ARGV: stage, consumer, id, next stage, prompt id, token of the output's record in `incoming`, scores ('': none), for a
--       group that was rolled out the turns of its completions
-- Returns 1, or 0 if the lease was lost, or -1 if the record is not there: send both again.
local stage, id, next_stage, scores = ARGV[1], ARGV[3], ARGV[4], ARGV[7] or ''
local incoming = key(next_stage .. ':incoming:' .. ARGV[6])
local record = scores == '' and incoming or payload_key(stage, id)
if owner(stage, id) ~= ARGV[2] then
  redis.call('UNLINK', incoming)
  return 0
end
if scores ~= '' then
  if redis.call('EXISTS', record) == 0 then return -1 end
elseif redis.call('PERSIST', incoming) == 0 then return -1 end
local entry = {'prompt', ARGV[5]}
if scores ~= '' then entry = {'prompt', ARGV[5], 'scores', scores} end
local output = redis.call('XADD', key(next_stage), '*', unpack(entry))
redis.call('RENAME', record, payload_key(next_stage, output))
if is_current(ARGV[5], stage, id) then set_current(ARGV[5], next_stage, output) end
local turns, saved = tonumber(ARGV[8] or 0), failures(stage, id, 'sampled')
count_turns(stage, 'kept', turns)
count_turns(stage, turns > saved and 'sampled' or 'again', math.abs(turns - saved))
redis.call('HDEL', key(stage .. ':attempts'), id .. ':sampled')
delete_entry(stage, id)
count_completed(stage, 1)
wake()
return 1
