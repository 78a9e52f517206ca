#!lua flags=allow-oom
-- A checkpoint that holds their effect is durable: marked entries are deleted.
-- ARGV: fencing token, id, ...
-- Returns the number deleted, or -1 where another trainer has taken over.
if not is_trainer(ARGV[1]) then return -1 end
local n = 0
for i = 2, #ARGV do
  if redis.call('HDEL', key('scored:ended'), ARGV[i]) == 1 then
    forget('scored', ARGV[i])
    n = n + 1
  end
end
return n
