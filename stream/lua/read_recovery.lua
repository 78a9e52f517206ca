#!lua flags=no-writes
-- Read, at one moment, what a trainer must know to recover. Writes nothing.
-- Returns {prompts ended by trainers, bytes of the ledger whose groups were deleted (-1: unknown), {entry id, prompt id,
--         counted outcome or '', ...} of marked entries, {id, ...} of unfinished prompts, token of the trainer that deleted
--         them}
-- Workers, feeder and operator do not change the first number: a prompt that they feed, end or take up again moves between
-- the other terms.
local fed = tonumber(redis.call('HGET', key('counts'), 'fed') or 0)
local ended = fed - redis.call('HLEN', key('unfinished')) - redis.call('HLEN', key('dead_prompts'))
  - redis.call('SCARD', key('dropped_dead'))
local flat, marked = redis.call('HGETALL', key('scored:marked')), {}
for i = 1, #flat, 2 do
  marked[#marked + 1] = flat[i]
  marked[#marked + 1] = flat[i + 1]
  marked[#marked + 1] = redis.call('HGET', key('scored:counted'), flat[i]) or ''
end
return {ended, tonumber(redis.call('HGET', key('policy'), 'acknowledged') or -1), marked,
  redis.call('HKEYS', key('unfinished')), tonumber(redis.call('HGET', key('policy'), 'acknowledged_by') or 0)}
