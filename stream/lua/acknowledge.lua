-- A checkpoint that holds their effect is durable: marked entries are deleted.
-- ARGV: fencing token, id, ...
-- Returns the number deleted, or -1 where another trainer has taken over.
if redis.call('HGET', key('policy'), 'fence') ~= ARGV[1] then return -1 end
local n = 0
for i = 2, #ARGV do
  if redis.call('ZREM', key('scored:marks'), ARGV[i]) == 1 then
    forget('scored', ARGV[i])
    n = n + 1
  end
end
return n
