#!lua flags=allow-oom
-- An operator's word on one of the run's engines. Whoever speaks to engines reads the stream, and hears it at once.
-- ARGV: URL, word (add, remove), who says it, how many URLs are remembered
-- Returns {1} · {0} that is the last word on it already · {-2} no such run · {-3} the list is full of added ones.
-- The stream has one entry, which is the whole list: a field for each URL with the last word on it, the newest at its end.
-- A removed engine stays in it, since settings may name it too; the oldest of those go when the list is full.
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
kept[#kept + 1] = ARGV[2] .. ' ' .. whole(now_ms()) .. ' ' .. ARGV[3]
redis.call('XADD', key('engines'), 'MAXLEN', '=', 1, '*', unpack(kept))
return {1}
