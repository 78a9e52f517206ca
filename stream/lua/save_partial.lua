#!lua
-- Save a part of an unfinished group for the next attempt at its prompt. `delete_entry` deletes it.
-- ARGV: stage, consumer, id, what (partials: finished completions; turns: turns of an agent), field, payload, for turns
--       also how many this attempt has so far
-- Returns 1, or 0 if the lease was lost.
local stage, id, what = ARGV[1], ARGV[3], ARGV[4]
if owner(stage, id) ~= ARGV[2] then return 0 end
redis.call('HSET', key(stage .. ':' .. what .. ':' .. id), ARGV[5], ARGV[6])
local attempts, has_advanced = key(stage .. ':attempts'), true
if what == 'turns' then -- an attempt that dies where the one before died has not advanced
  has_advanced = tonumber(ARGV[7]) > tonumber(redis.call('HGET', attempts, id .. ':turns') or 0)
  if has_advanced then redis.call('HSET', attempts, id .. ':turns', ARGV[7]) end
end
if has_advanced then redis.call('HDEL', attempts, id .. ':deaths') end -- progress: deaths count in a row
return 1
