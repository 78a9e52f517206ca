#!lua flags=allow-oom
-- Put a dead letter back into its stage (retry), or delete it (drop).
-- ARGV: id, action (retry, drop)
-- Returns {1} · {0} no such letter · {-1} the letter has no stage to return to · {-2} the letter is from an evaluation, which
--         has counted it.
local found = redis.call('XRANGE', key('dead'), ARGV[1], ARGV[1])
if not found[1] then return {0} end
local flat = found[1][2]
local stage, prompt, ends_prompt = field(flat, 'stage'), field(flat, 'prompt'), field(flat, 'ends_prompt') == '1'
local from_evaluation = is_evaluation(stage or '')
if from_evaluation and ARGV[2] == 'retry' then return {-2} end
if ARGV[2] == 'retry' then
  local entry = {}
  for i = 1, #flat, 2 do
    if string.sub(flat[i], 1, 2) == 'f:' then
      entry[#entry + 1] = string.sub(flat[i], 3)
      entry[#entry + 1] = flat[i + 1]
    end
  end
  if not stage or #entry == 0 then return {-1} end
  local id = redis.call('XADD', key(stage), '*', unpack(entry))
  move_payload(payload_key('dead', ARGV[1]), payload_key(stage, id))
  if ends_prompt then
    set_current(prompt, stage, id)
    note_outcome(prompt, 'retried')
  end
elseif ends_prompt and not from_evaluation then
  count_outcome(prompt, 'dropped:operator')
  note_outcome(prompt, 'dropped:operator')
end
if ends_prompt and not from_evaluation then redis.call('HDEL', key('dead_prompts'), prompt) end
if not from_evaluation then redis.call('HINCRBY', key('counts'), ends_prompt and 'dead' or 'extra_dead_letters', -1) end
redis.call('XDEL', key('dead'), ARGV[1])
redis.call('UNLINK', payload_key('dead', ARGV[1]))
wake()
return {1}
