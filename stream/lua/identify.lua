#!lua flags=allow-oom
-- Compare what a process knows about the run with what the server knows, and record it if nothing differs.
-- ARGV: id of the run in the process's folder ('' if it has none), then three lists, each with its length in front:
--       name, value, ... that must be the server's · that replace the server's, accepted by the operator ('' removes one) ·
--       that are recorded if the server has none
-- Returns {id on the server before the call ('' if none), name, the server's value, ...} for each name that differs.
-- If the id or a name differs, nothing is recorded.
local identity, at = key('identity'), 2
local function pairs_of_next_list()
  local found, first = {}, at + 1
  at = first + 2 * tonumber(ARGV[at])
  for i = first, at - 1, 2 do found[#found + 1] = {ARGV[i], ARGV[i + 1]} end
  return found
end
local compared, accepted, known = pairs_of_next_list(), pairs_of_next_list(), pairs_of_next_list()
local id = redis.call('HGET', identity, 'id') or ''
local reply, accepts = {id}, {}
for _, each in ipairs(accepted) do accepts[each[1]] = true end
for _, each in ipairs(compared) do
  local stored = redis.call('HGET', identity, each[1])
  if stored and stored ~= each[2] and not accepts[each[1]] then
    reply[#reply + 1] = each[1]
    reply[#reply + 1] = stored
  end
end
if #reply > 1 or (id ~= '' and ARGV[1] ~= '' and id ~= ARGV[1]) then return reply end
if ARGV[1] ~= '' then redis.call('HSET', identity, 'id', ARGV[1]) end
for _, each in ipairs(accepted) do
  if each[2] == '' then redis.call('HDEL', identity, each[1]) else redis.call('HSET', identity, each[1], each[2]) end
  -- New rows are fed by a feeder that had fed everything.
  if string.sub(each[1], 1, 5) == 'data.' then redis.call('HDEL', key('feed'), 'done') end
end
for _, list in ipairs({compared, known}) do
  for _, each in ipairs(list) do redis.call('HSETNX', identity, each[1], each[2]) end
end
return reply
