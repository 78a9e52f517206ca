#!lua flags=allow-oom
-- Set the operator's override for one engine. Readers of the stream see it immediately.
-- ARGV: URL, action (add, remove), by whom, how many URLs are kept
-- Returns {1} · {0} the override is set to this action already · {-2} no such run · {-3} the list is full of added engines.
-- The stream has one entry, which holds the whole list: one field per URL, the newest last. A removed engine stays in the
-- list, since the settings may name it too; the oldest removals are deleted when the list is full.
if redis.call('EXISTS', key('prompts')) == 0 then return {-2} end
local last = redis.call('XREVRANGE', key('engines'), '+', '-', 'COUNT', 1)
local flat, kept, removed, most = last[1] and last[1][2] or {}, {}, 0, tonumber(ARGV[4])
for i = 1, #flat, 2 do
  if string.sub(flat[i + 1], 1, 7) == 'remove ' then removed = removed + 1 end
end
local surplus = math.min(removed, #flat / 2 + 1 - most)
for i = 1, #flat, 2 do
  local is_removed = string.sub(flat[i + 1], 1, 7) == 'remove '
  if flat[i] == ARGV[1] then
    if is_removed == (ARGV[2] == 'remove') then return {0} end
  elseif is_removed and surplus > 0 then
    surplus = surplus - 1
  else
    kept[#kept + 1] = flat[i]
    kept[#kept + 1] = flat[i + 1]
  end
end
if #kept / 2 >= most then return {-3} end
kept[#kept + 1] = ARGV[1]
kept[#kept + 1] = ARGV[2] .. ' ' .. integer(now_ms()) .. ' ' .. ARGV[3]
redis.call('XADD', key('engines'), 'MAXLEN', '=', 1, '*', unpack(kept))
return {1}
