#!lua flags=allow-oom
-- Delete marked entries after a checkpoint that contains their effect is durable.
-- ARGV: fencing token, id, ...
-- Returns the number deleted, or -1 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return -1 end
local n = 0
for i = 2, #ARGV do
  if redis.call('HDEL', key('scored:marked'), ARGV[i]) == 1 then
    delete_entry('scored', ARGV[i])
    n = n + 1
  end
end
return n
