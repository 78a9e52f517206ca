#!lua flags=allow-oom
-- Mark groups with their outcome; they are deleted when a durable checkpoint acknowledges them.
-- ARGV: consumer, fencing token, version whose publication frees the capacity of trained groups, then id, prompt id,
--       outcome, ...
--       outcome: `trained` · `dropped:REASON` · `already:OUTCOME` if the ledger has that OUTCOME of the prompt already ·
--       `duplicate:ENTRY` if ENTRY, a newer entry of the prompt, replaces this one, which ends nothing and uses no capacity
--       `step:` before it: the group was part of a step, so its capacity is freed by the version even if it was dropped
-- Returns {1, ids whose lease was lost} · {0} if another trainer has taken over.
if not is_trainer(ARGV[2]) then return {0} end
-- Forget that the operator dropped a prompt's dead letter; returns whether that was so.
local function undo_drop(prompt)
  if redis.call('SREM', key('dropped_dead'), prompt) == 0 then return false end
  redis.call('HINCRBY', key('counts'), 'dropped:operator', -1)
  return true
end
local lost, marked = {}, 0
for i = 4, #ARGV, 3 do
  local id, prompt, outcome = ARGV[i], ARGV[i + 1], string.gsub(ARGV[i + 2], '^step:', '')
  local in_step = outcome ~= ARGV[i + 2]
  local holder = owner('scored', id)
  if holder == ARGV[1] then
    assign('scored', id, 'marked')
    redis.call('ZREM', key('scored:leases'), id)
    redis.call('HSET', key('scored:marked'), id, prompt)
    if outcome == 'trained' or in_step then redis.call('ZADD', key('unpublished'), ARGV[3], id) end
    local kept = string.match(outcome, '^duplicate:(.+)$')
    local was_unfinished = not kept and redis.call('HDEL', key('unfinished'), prompt)
    if not kept then clear_inflight_version(prompt) end
    local recorded = string.match(outcome, '^already:(.*)')
    if kept then
      if is_current(prompt, 'scored', id) then set_current(prompt, 'scored', kept) end
      redis.call('HINCRBY', key('counts'), 'duplicates', 1)
    else
      local replaces = was_unfinished == 1 or undo_dead_letter(prompt) or (not recorded and undo_drop(prompt))
      if replaces or not recorded then
        if not replaces then redis.call('HINCRBY', key('counts'), 'fed', 1) end -- an entry that no feeder added
        -- An outcome that only the ledger has is counted here: the server lost its write.
        count_outcome(prompt, recorded or outcome)
        redis.call('HSET', key('scored:counted'), id, recorded or outcome)
      else
        redis.call('HINCRBY', key('counts'), 'duplicates', 1)
      end
    end
    marked = marked + 1
  elseif holder ~= 'marked' then
    lost[#lost + 1] = id
  end
end
count_completed('scored', marked)
wake()
return {1, lost}
