#!lua flags=allow-oom
-- Give an entry back, available to every worker after a delay; dead-letter it if its failure limit is reached.
-- ARGV: stage, consumer, id, reason (infra, data, none, stale), failure limit of that reason, delay_ms, error, ms that the
--       lease was held
-- `stale` (prompts only): the attempt was cancelled because newer policies overtook it. It has no limit here; the worker
-- that cancels decides how often.
-- Returns 0 lease lost, 1 given back, 2 dead-lettered.
local stage, id, reason = ARGV[1], ARGV[3], ARGV[4]
if owner(stage, id) ~= ARGV[2] then return 0 end
if ARGV[7] ~= '' then note_error(stage, ARGV[7]) end
redis.call('HDEL', key(stage .. ':attempts'), id .. ':alone')
if reason == 'stale' then
  local before = redis.call('HGET', key(stage .. ':attempts'), id .. ':stale')
  redis.call('HSET', key(stage .. ':attempts'), id .. ':stale', (before and before .. ',' or '') .. ARGV[8])
  redis.call('HINCRBY', key('counts'), 'cancelled', 1)
  delete_partials(stage, id) -- they are from old policies; with them the next attempt would be stale immediately
elseif reason ~= 'none' then
  redis.call('HDEL', key(stage .. ':attempts'), id .. ':deaths') -- the work came to its end, and its worker lives
  local n = redis.call('HINCRBY', key(stage .. ':attempts'), id .. ':' .. reason, 1)
  if n >= tonumber(ARGV[5]) then
    dead_letter(stage, id, reason, ARGV[7])
    wake()
    return 2
  end
end
if stage == 'prompts' then clear_inflight_version(field(fields(stage, id) or {}, 'prompt') or '') end
if tonumber(ARGV[6]) > tonumber(redis.call('HGET', key('server'), 'delay_ms') or 0) then
  redis.call('HSET', key('server'), 'delay_ms', ARGV[6])
end
requeue(stage, id, now_ms() + ARGV[6])
wake()
return 1
