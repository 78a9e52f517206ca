#!lua flags=no-writes
-- Read how many turns were sampled, and what became of them, at one moment.
-- Returns {flat fields of the hash `turns`, saved turns of an unfinished entry, of another one, ...}
local answer = {redis.call('HGETALL', key('turns'))}
local attempts = redis.call('HGETALL', key('prompts:attempts'))
for i = 1, #attempts, 2 do
  if string.sub(attempts[i], -8) == ':sampled' then answer[#answer + 1] = tonumber(attempts[i + 1]) end
end
return answer
