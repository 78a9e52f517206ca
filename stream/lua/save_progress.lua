#!lua flags=allow-oom
-- Save parts of unfinished groups for the next attempts at their prompts. `delete_entry` deletes them.
-- ARGV: stage, consumer, then for each part: id of the entry, what, field, record, number, n, names of n saved turns
--   turn        a sampled turn under the name `field`; number: the turns that this attempt has so far
--   completion  a finished completion with the index `field`; number: its turns; names: its turns, which it replaces
--   resumed     how an unfinished completion was restored: `field` is `INDEX:METHOD`, `record` the attempt; names: turns that
--               are not used, and deleted
-- Returns {1 if nothing was saved because the server is short of memory, ids of the entries whose lease was lost}.
local stage, consumer = ARGV[1], ARGV[2]
-- What is left is for the groups, which free the memory of all this.
if memory_exceeds(0.8, 0) then return {1, {}} end
local attempts, is_owned, lost = key(stage .. ':attempts'), {}, {}

local function delete_names(turns, first, n)
  if n == 0 then return 0 end
  return redis.call('HDEL', turns, unpack(ARGV, first, first + n - 1))
end

-- Turns that end with this completion, or that nobody uses, count no more as saved ones of an unfinished completion.
local function count_saved(id, n)
  if n ~= 0 and redis.call('HINCRBY', attempts, id .. ':sampled', integer(n)) == 0 then
    redis.call('HDEL', attempts, id .. ':sampled')
  end
end

local save = {}
function save.turn(id, turns, name, record, number)
  if redis.call('HSET', turns, name, record) == 1 then
    count_saved(id, 1)
    count_turns(stage, 'sampled', 1)
  end
  -- An attempt that dies where the one before died has not advanced.
  if number <= tonumber(redis.call('HGET', attempts, id .. ':turns') or 0) then return false end
  redis.call('HSET', attempts, id .. ':turns', integer(number))
  return true
end
function save.completion(id, turns, index, record, number, first, n)
  local is_new = redis.call('HSET', key(stage .. ':partials:' .. id), index, record) == 1
  local saved = delete_names(turns, first, n)
  if is_new then
    count_saved(id, number - saved)
    count_turns(stage, number > saved and 'sampled' or 'again', math.abs(number - saved))
  end
  return true
end
function save.resumed(id, turns, field, record, number, first, n)
  local index, method = string.match(field, '^(%d+):(%w+)$')
  local unused = delete_names(turns, first, n)
  count_saved(id, -unused)
  count_turns(stage, 'again', unused)
  if redis.call('HGET', turns, 'resumed/' .. index) ~= record .. method then
    redis.call('HSET', turns, 'resumed/' .. index, record .. method)
    count_turns(stage, 'resumed:' .. method, 1)
  end
  return false
end

local i = 3
while i <= #ARGV do
  local id, n = ARGV[i], tonumber(ARGV[i + 5])
  if is_owned[id] == nil then
    is_owned[id] = owner(stage, id) == consumer
    if not is_owned[id] then lost[#lost + 1] = id end
  end
  if is_owned[id] then
    local turns = key(stage .. ':turns:' .. id)
    local has_advanced = save[ARGV[i + 1]](id, turns, ARGV[i + 2], ARGV[i + 3], tonumber(ARGV[i + 4]), i + 6, n)
    if has_advanced then redis.call('HDEL', attempts, id .. ':deaths') end -- progress: deaths count in a row
  end
  i = i + 6 + n
end
return {0, lost}
