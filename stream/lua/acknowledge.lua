#!lua flags=allow-oom
-- Delete marked entries after a checkpoint that contains their effect is durable.
-- ARGV: fencing token, length of the checkpoint's ledger in bytes ('': unknown), id, ...
-- Returns the number deleted, or -1 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return -1 end
local n = 0
for i = 3, #ARGV do
  if redis.call('HDEL', key('scored:marked'), ARGV[i]) == 1 then
    redis.call('HDEL', key('scored:counted'), ARGV[i])
    delete_entry('scored', ARGV[i])
    n = n + 1
  end
end
if n > 0 and ARGV[2] ~= '' then redis.call('HSET', key('policy'), 'acknowledged', ARGV[2], 'acknowledged_by', ARGV[1]) end
return n
