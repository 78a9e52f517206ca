-- Prepended to every script, after its first line. One script is one atomic step.
--
-- The first line of a script says what happens when the server is out of memory. A script that adds payloads (feed) is
-- refused before it starts, and its caller waits. A script that renews, marks or removes runs (allow-oom), because otherwise
-- memory would never be freed; so does save_progress, which refuses by itself, and earlier.
--
-- KEYS[1] is the run's prefix, `{NAME}`. The braces keep all keys of a run in one slot of a cluster, so a script may build
-- the other key names itself. For each stage S of prompts, groups, scored:
--   {NAME}:S            stream with consumer group `penstock`; an entry has `prompt` (id); in prompts also `payload` (record);
--                       in scored also `scores`, if the record is that of the rollout
--   {NAME}:S:payload:ID string, record of an entry of groups or scored. A group has hundreds of kilobytes or more, which cost
--                       a script a microsecond for each kilobyte that it touches; so no script reads or writes them
--   {NAME}:S:incoming:TOKEN string, such a record that was sent together with the script that adds its entry. The script
--                       renames it; without the script it expires
--   {NAME}:S:leases     zset, entry id -> ms at which the lease of its owner expires
--   {NAME}:S:retries    zset, entry id -> ms before which no worker may claim it again (owned by consumer `released`)
--   {NAME}:S:attempts   hash, `ID:infra` and `ID:data` -> failures so far; `ID:deaths` -> how many workers in a row died or
--                       stopped responding while they held the entry; `ID:alone` -> name of the worker that works on this
--                       entry and on nothing else, and what it runs; for prompts also `ID:stale` -> run time in ms of each
--                       attempt that was cancelled as stale, for example `1200` or `1200,3400`; `ID:turns` -> the most
--                       turns that an attempt had; `ID:sampled` -> turns that are saved, as turns or within completions
--   {NAME}:S:partials:ID hash, completion index -> record: finished completions of an entry's unfinished group
--   {NAME}:S:turns:ID   hash, sampled turns of its unfinished completions: `INDEX/NUMBER` -> record; of an agent
--                       `INDEX/CONTEXT/NUMBER`; `resumed/INDEX` -> the attempt that restored it, and how
--   {NAME}:S:rate       hash, second modulo 60 -> second * 1e6 + entries completed in that second
-- S may also be eval:prompts or eval:groups, the stages of an evaluation. Their entries have the evaluated policy version
-- in a field `version`, do not count in any number of the run, and are deleted when the next evaluation begins.
-- For the run:
--   {NAME}:scored:marked hash, entry id -> prompt id: ended by the trainer, not yet acknowledged (owned by consumer `marked`)
--   {NAME}:scored:counted hash, id of a marked entry -> the outcome that it added to `counts`; a duplicate adds none
--   {NAME}:inflight_versions zset, prompt id -> policy version at its last claim, for outstanding groups. A group that is
--                       delivered again after its prompt had ended (trainer resumed, dead letter retried) is not in it
--   {NAME}:unpublished  zset, entry id -> policy version whose publication frees the capacity of this group
--   {NAME}:unfinished   hash, id of each prompt without an outcome -> `STAGE:ENTRY`, its current entry. Any other entry of
--                       that prompt (a duplicate, or a foreign entry with its id) ends nothing when it is dead-lettered
--   {NAME}:counts       hash, fed, trained, dropped:REASON, dead, duplicates; extra_dead_letters (that end no prompt:
--                       foreign entries, and duplicates); cancelled (attempts, not prompts); deaths (of workers, charged to
--                       an entry); dead_letters:REASON (entries that became dead letters, retried or not). An outcome is
--                       counted in the step that removes its prompt from `unfinished`, so at every moment
--                       fed = trained + dropped + dead + unfinished, by distinct prompts, also if the server lost writes
--   {NAME}:turns        hash, turns of prompts: `sampled` (saved, or completed with their group), `kept` (in completed groups),
--                       `again` (lost, to be sampled again or given up); so sampled = kept + again + those that entries have
--                       saved. Beside them `resumed:METHOD`, completions that another attempt restored
--   {NAME}:dead         stream of dead letters
--   {NAME}:dead:payload:ID string, record of a dead letter whose entry had one
--   {NAME}:last_errors  hash, stage -> ms and text of the last error by which a worker gave an entry back
--   {NAME}:dead_prompts hash, prompt id -> id of the dead letter that ends it
--   {NAME}:dropped_dead set, ids of prompts whose dead letters the operator dropped
--   {NAME}:unrecorded_outcomes stream of `prompt` and `outcome` (dead:REASON, dropped:operator, retried): ends that were
--                       decided without the trainer and are not in the ledger yet; the trainer writes them there
--   {NAME}:feed         hash, the feeder's cursor and `done`
--   {NAME}:policy       hash, version, path, step, next (version), fence (token), owner, owner_until, owner_lease_ms, ledger
--                       (bytes at the trainer's start), recovered (token of the trainer that recovered last: another one
--                       means that the server lost that write), acknowledged (bytes of the ledger whose groups were deleted
--                       here) and acknowledged_by (token of the trainer that deleted them)
--   {NAME}:server       hash, `id` (the server's run id), `until` (ms before which no trainer lease expires, set after a
--                       server restart), `lease_ms` and `delay_ms` (the longest lease and retry delay so far: one that
--                       ends later is from before the clock stepped back); a key of its own because every worker may
--                       write it
--   {NAME}:meta         hash, facts about the run, `finished`; while paused also `paused` (by whom) and `paused_ms`; `stop`
--                       (number of the last stop request, only grows) and `stop_by`
--   {NAME}:identity     hash, `id` of the run, and by name what stays the same in it (arrangement of keys, seed, data, small
--                       files of the model); every process compares itself with it before it claims (`run_identity.py`)
--   {NAME}:model_files  hash, tokenizer, chat template and configuration of the model, for workers without its folder: file
--                       name -> SHA-256 and compressed content; the trainer writes it when it starts
--   {NAME}:ledger_ends  string, the end of each prompt in the ledger, compressed, for a feeder without the run's folder; only
--                       if the trainer started when feeding had not begun
--   {NAME}:latest       hash, metrics of the last step, for display
--   {NAME}:in_flight:S:WORKER string, what a worker's leases in S are doing (JSON, `GroupInFlight`); written at most once a
--                       second, for people alone, and expires as a lease does
--   {NAME}:memory       hash, who reports -> ms and JSON (`MachineMemory`): what one machine's processes hold in memory, for
--                       people alone; every two seconds
--   {NAME}:sandboxes:PLACE hash, name of each sandbox that is not known to be gone -> JSON (`SandboxRecord`): its entry, its
--                       owner and fence, when it was noted, until when it lives, since when it is lost, whether it is due for
--                       removal. Noted before it is created, deleted after it was removed
--   {NAME}:sandbox_places hash, place -> provider that makes its sandboxes
--   {NAME}:sandbox_counts hash, begun, ended:stopped, ended:reaped, ended:stray, adopted. They change in the step that adds
--                       or deletes the record, so at every moment begun = ended + records
--   {NAME}:sandbox_reaper:PLACE string, the worker that looks for lost sandboxes there now; expires
--   {NAME}:wake         stream with one entry; every blocked worker waits on it
--   {NAME}:published    stream with one entry, the policy version; for readers that must see each version immediately
-- For evaluation:
--   {NAME}:eval         hash, `settings` (digest of the settings that made the dataset below), `data` (its fingerprint),
--                       `prompts` (their number); for the current or last evaluation: `version`, `step`, `total`, and
--                       `finished` once it has ended; `latest` (JSON): the last result
--   {NAME}:eval:dataset hash, prompt id -> record: the evaluation prompts
--   {NAME}:eval:unfinished hash, id of each prompt without a result -> `STAGE:ENTRY`, as in `unfinished`
--   {NAME}:eval:results hash, prompt id -> result (JSON)

local run = KEYS[1]
local GROUP = 'penstock'
local SUSPECT_DEATHS = 2

local function key(name) return run .. ':' .. name end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function wake() redis.call('XADD', key('wake'), 'MAXLEN', '=', 1, '*', 'e', '') end

-- The id of the last entry of `wake`.
local function wake_id()
  local last = redis.call('XREVRANGE', key('wake'), '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

-- The consumer that owns a pending entry, or nil.
local function owner(stage, id)
  local pending = redis.call('XPENDING', key(stage), GROUP, id, id, 1)
  return pending[1] and pending[1][2]
end

-- The fields of an entry as a flat list, or nil if the entry does not exist.
local function fields(stage, id)
  local found = redis.call('XRANGE', key(stage), id, id)
  return found[1] and found[1][2]
end

local function field(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end

local function is_evaluation(stage) return string.sub(stage, 1, 5) == 'eval:' end

-- The key of the prompts of a stage's flow that have no outcome.
local function unfinished_key(stage) return key(is_evaluation(stage) and 'eval:unfinished' or 'unfinished') end

-- Make an entry the current one of its prompt; add the prompt if it is new.
local function set_current(prompt, stage, id) redis.call('HSET', unfinished_key(stage), prompt, stage .. ':' .. id) end

local function is_current(prompt, stage, id)
  return redis.call('HGET', unfinished_key(stage), prompt) == stage .. ':' .. id
end

local function failures(stage, id, kind)
  return tonumber(redis.call('HGET', key(stage .. ':attempts'), id .. ':' .. kind) or 0)
end

-- Format an integer. Lua's own conversion writes round numbers as 1e+15, which Redis does not accept as an integer.
local function integer(number) return string.format('%.0f', number) end

-- The key of an entry's record, if the entry itself does not have it.
local function payload_key(stream, id) return key(stream .. ':payload:' .. id) end

-- Let a record belong to another entry; returns whether there is one.
local function move_payload(from, to)
  if redis.call('EXISTS', from) == 0 then return false end
  redis.call('RENAME', from, to)
  return true
end

-- Count turns of the run's own prompts.
local function count_turns(stage, name, n)
  if n ~= 0 and stage == 'prompts' then redis.call('HINCRBY', key('turns'), name, integer(n)) end
end

-- Delete the saved completions and turns of an entry, so that the next attempt starts from nothing.
local function delete_partials(stage, id)
  redis.call('UNLINK', key(stage .. ':partials:' .. id), key(stage .. ':turns:' .. id))
  local attempts, saved = key(stage .. ':attempts'), id .. ':sampled'
  count_turns(stage, 'again', tonumber(redis.call('HGET', attempts, saved) or 0))
  redis.call('HDEL', attempts, saved)
end

-- Delete an entry with its lease, retries, failures and partials.
local function delete_entry(stage, id)
  redis.call('XACK', key(stage), GROUP, id)
  redis.call('XDEL', key(stage), id)
  redis.call('ZREM', key(stage .. ':leases'), id)
  redis.call('ZREM', key(stage .. ':retries'), id)
  for _, what in ipairs({'infra', 'data', 'deaths', 'alone', 'stale', 'turns'}) do
    redis.call('HDEL', key(stage .. ':attempts'), id .. ':' .. what)
  end
  redis.call('UNLINK', payload_key(stage, id))
  delete_partials(stage, id)
end

-- Delete all entries of a stage.
local function delete_entries(stage)
  for _, entry in ipairs(redis.call('XRANGE', key(stage), '-', '+')) do
    redis.call('UNLINK', payload_key(stage, entry[1]))
    delete_partials(stage, entry[1])
  end
  for _, part in ipairs({'', ':leases', ':retries', ':attempts'}) do redis.call('UNLINK', key(stage .. part)) end
  redis.call('XGROUP', 'CREATE', key(stage), GROUP, '0', 'MKSTREAM')
end

-- The policy version that a prompt claimed now starts with; 0 before the first publication, since nothing is sampled
-- before.
local function current_version() return math.max(0, tonumber(redis.call('HGET', key('policy'), 'version') or 0)) end

local function set_inflight_version(prompt) redis.call('ZADD', key('inflight_versions'), current_version(), prompt) end

local function clear_inflight_version(prompt) redis.call('ZREM', key('inflight_versions'), prompt) end

-- Assign a pending entry to another consumer, real or reserved.
local function assign(stage, id, consumer)
  redis.call('XCLAIM', key(stage), GROUP, consumer, 0, id, 'JUSTID')
end

local function set_lease(stage, id, until_ms)
  redis.call('ZREM', key(stage .. ':retries'), id)
  redis.call('ZADD', key(stage .. ':leases'), until_ms, id)
end

-- Make an entry available to every worker, not before due_ms.
local function requeue(stage, id, due_ms)
  assign(stage, id, 'released')
  redis.call('ZREM', key(stage .. ':leases'), id)
  redis.call('ZADD', key(stage .. ':retries'), due_ms, id)
end

-- The number of the last stop request; 0 if there was none.
local function last_stop() return tonumber(redis.call('HGET', key('meta'), 'stop') or 0) end

local function is_paused() return redis.call('HEXISTS', key('meta'), 'paused') == 1 end

-- Whether the caller is the run's trainer. Tokens only grow: a smaller token on the server means that the server lost its
-- last writes, a larger one that another trainer has taken over.
local function is_trainer(token)
  local fence = redis.call('HGET', key('policy'), 'fence')
  if not fence then error({err = 'NOGROUP the run has no trainer'}) end
  if fence == token then return true end
  if tonumber(fence) > tonumber(token) then return false end
  redis.call('HSET', key('policy'), 'fence', token)
  return true
end

-- Extend all leases, the trainer's too, if the server was restarted since they were given: no worker could renew while it
-- was down. Returns whether it was restarted.
local function extend_after_restart(lease_ms)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  local known = redis.call('HGET', key('server'), 'id')
  if known == server then return false end
  local until_ms = now_ms() + lease_ms
  redis.call('HSET', key('server'), 'id', server, 'until', integer(known and until_ms or 0))
  if not known then return false end
  for _, stage in ipairs({'prompts', 'groups', 'scored', 'eval:prompts', 'eval:groups'}) do
    for _, id in ipairs(redis.call('ZRANGE', key(stage .. ':leases'), 0, -1)) do
      redis.call('ZADD', key(stage .. ':leases'), 'GT', until_ms, id)
    end
  end
  return true
end

-- Whether more than this share of the server's memory limit is in use, `extra` bytes included. Prompts must leave room for
-- the groups that are made of them: a server that is full of prompts can complete nothing.
local function memory_exceeds(share, extra)
  local info = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(info, 'maxmemory:(%d+)') or 0)
  return limit > 0 and tonumber(string.match(info, 'used_memory:(%d+)')) + extra > share * limit
end

-- Note an end that was decided without the trainer, for the ledger.
local function note_outcome(prompt, outcome)
  redis.call('XADD', key('unrecorded_outcomes'), '*', 'prompt', prompt, 'outcome', outcome)
end

-- Count a prompt's outcome; the caller removes the prompt from `unfinished`, or counts it as fed.
local function count_outcome(prompt, outcome)
  redis.call('HINCRBY', key('counts'), outcome, 1)
  if outcome == 'dropped:operator' then redis.call('SADD', key('dropped_dead'), prompt) end
end

-- Let the dead letter of a prompt end nothing, because the prompt has another end. Returns whether there was one.
local function undo_dead_letter(prompt)
  local id = redis.call('HGET', key('dead_prompts'), prompt)
  if not id then return false end
  redis.call('HDEL', key('dead_prompts'), prompt)
  local found = redis.call('XRANGE', key('dead'), id, id)
  if found[1] then
    local flat = found[1][2]
    for i = 1, #flat, 2 do
      if flat[i] == 'ends_prompt' then flat[i + 1] = '0' end
    end
    local again = redis.call('XADD', key('dead'), '*', unpack(flat))
    move_payload(payload_key('dead', id), payload_key('dead', again))
    redis.call('XDEL', key('dead'), id)
    redis.call('HINCRBY', key('counts'), 'extra_dead_letters', 1)
  end
  redis.call('HINCRBY', key('counts'), 'dead', -1)
  return true
end

-- Note the last error of a stage, which explains a run that stands still.
local function note_error(stage, text)
  redis.call('HSET', key('last_errors'), stage, integer(now_ms()) .. ' ' .. text)
end

-- Move an entry with its payload to the dead letters. Of an entry with very many fields (a foreign one) only the first
-- hundred are kept, because `unpack` can return only a limited number of values.
local function dead_letter(stage, id, reason, message)
  note_error(stage, message)
  local flat = fields(stage, id)
  if flat then
    local prompt = field(flat, 'prompt') or ''
    local ends_prompt = is_current(prompt, stage, id) and redis.call('HDEL', unfinished_key(stage), prompt) or 0
    if not is_evaluation(stage) then
      if ends_prompt == 1 then clear_inflight_version(prompt) end
      redis.call('HINCRBY', key('counts'), ends_prompt == 1 and 'dead' or 'extra_dead_letters', 1)
    end
    local letter = {
      'stage', stage, 'prompt', prompt, 'reason', reason, 'error', message, 'ends_prompt', ends_prompt, 'entry', id,
      'infra', failures(stage, id, 'infra'), 'data', failures(stage, id, 'data'),
    }
    for i = 1, math.min(#flat, 200), 2 do
      letter[#letter + 1] = 'f:' .. flat[i]
      letter[#letter + 1] = flat[i + 1]
    end
    local written = redis.call('XADD', key('dead'), '*', unpack(letter))
    move_payload(payload_key(stage, id), payload_key('dead', written))
    redis.call('HINCRBY', key('counts'), 'dead_letters:' .. reason, 1)
    if ends_prompt == 1 and not is_evaluation(stage) then
      redis.call('HSET', key('dead_prompts'), prompt, written)
      note_outcome(prompt, 'dead:' .. reason)
    end
  end
  delete_entry(stage, id)
end

-- Count the death of the worker that holds an entry. After two deaths in a row the entry is worked on alone, and each
-- further death is charged to it: of entries that die together, all but one are mere neighbours. A death while it waits for
-- its turn does not count. `how` says how the worker ended, if that is known.
-- Returns the deaths in a row (0: this one does not count), what the worker ran if it was charged, else nil, and whether the
-- entry became a dead letter.
local function count_death(stage, id, infra_limit, how)
  local attempts, before = key(stage .. ':attempts'), failures(stage, id, 'deaths')
  local worker, ran = string.match(redis.call('HGET', attempts, id .. ':alone') or '', '^(%S+) ?(.*)$')
  local was_alone = worker and worker == owner(stage, id)
  if before >= SUSPECT_DEATHS and not was_alone then return 0, nil, false end
  local deaths = redis.call('HINCRBY', attempts, id .. ':deaths', 1)
  if not was_alone then return deaths, nil, false end
  redis.call('HDEL', attempts, id .. ':alone')
  redis.call('HINCRBY', key('counts'), 'deaths', 1)
  if redis.call('HINCRBY', attempts, id .. ':infra', 1) < infra_limit then return deaths, ran, false end
  local why = deaths .. ' of its workers in a row died or stopped responding, at the end while they worked on it alone'
  if ran ~= '' then why = why .. ' (' .. ran .. ')' end
  dead_letter(stage, id, 'infra', how == '' and why or why .. '; ' .. how)
  return deaths, ran, true
end

-- The number of outstanding groups: claimed, waiting to be scored, waiting to be trained, or trained for a version that is
-- not published yet.
local function outstanding()
  return redis.call('ZCARD', key('prompts:leases')) + redis.call('XLEN', key('groups')) + redis.call('XLEN', key('scored'))
    - redis.call('HLEN', key('scored:marked')) + redis.call('ZCARD', key('unpublished'))
end

-- Delete the current evaluation; workers with an entry of it lose their lease.
local function delete_evaluation()
  delete_entries('eval:prompts')
  delete_entries('eval:groups')
  redis.call('UNLINK', key('eval:unfinished'))
  redis.call('UNLINK', key('eval:results'))
end

-- Count n completed entries in the ring of the last 60 seconds.
local function count_completed(stage, n)
  local second = math.floor(now_ms() / 1000)
  local rate, slot = key(stage .. ':rate'), second % 60
  local seen = tonumber(redis.call('HGET', rate, slot) or 0)
  if math.floor(seen / 1000000) ~= second then seen = second * 1000000 end
  redis.call('HSET', rate, slot, integer(seen + n))
end
