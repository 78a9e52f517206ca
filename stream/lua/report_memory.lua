#!lua flags=allow-oom
-- Store what one machine's processes of the run hold in memory, for people, and remove reports that are old.
-- ARGV: who reports (a host, or a process that was started alone), JSON (`MachineMemory`)
local now, flat = now_ms(), redis.call('HGETALL', key('memory'))
for i = 1, #flat, 2 do
  if now - tonumber(string.match(flat[i + 1], '^%d+') or 0) > 60000 then redis.call('HDEL', key('memory'), flat[i]) end
end
redis.call('HSET', key('memory'), ARGV[1], integer(now) .. ' ' .. ARGV[2])
