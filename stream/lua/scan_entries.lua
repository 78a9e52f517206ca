#!lua flags=no-writes
-- Read a batch of a stream's entries without their payloads. Writes nothing.
-- ARGV: stream, id to continue after ('-': from the first), count, field, ...
-- Returns {{id, 1 if the trainer has marked it, each field or ''}, ...}
local after = ARGV[2] == '-' and '-' or '(' .. ARGV[2]
local found = {}
for _, entry in ipairs(redis.call('XRANGE', key(ARGV[1]), after, '+', 'COUNT', ARGV[3])) do
  local marked = ARGV[1] == 'scored' and redis.call('HEXISTS', key('scored:marked'), entry[1]) or 0
  local one = {entry[1], marked}
  for i = 4, #ARGV do one[#one + 1] = field(entry[2], ARGV[i]) or '' end
  found[#found + 1] = one
end
return found
