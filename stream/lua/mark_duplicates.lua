#!lua flags=allow-oom
-- Turn dead letters of prompts that have an outcome in the ledger into junk. They are duplicates, created when the server
-- lost its last writes; the outcome in the ledger is the one that counts.
-- ARGV: fencing token, then letter id, outcome in the ledger, ...
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
for i = 2, #ARGV, 2 do
  local found = redis.call('XRANGE', key('dead'), ARGV[i], ARGV[i])
  local flat = found[1] and found[1][2]
  if flat and field(flat, 'ends_prompt') == '1' then
    for j = 1, #flat, 2 do
      if flat[j] == 'ends_prompt' then flat[j + 1] = '0' end
    end
    redis.call('XADD', key('dead'), '*', unpack(flat))
    redis.call('XDEL', key('dead'), ARGV[i])
    redis.call('HINCRBY', key('counts'), 'dead', -1)
    redis.call('HINCRBY', key('counts'), 'junk', 1)
    redis.call('HINCRBY', key('counts'), ARGV[i + 1], 1)
  end
end
return 1
