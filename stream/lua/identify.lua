#!lua flags=allow-oom
-- Compare what a process knows about the run with what the server knows, and record it if nothing differs.
-- ARGV: id of the run in the process's folder ('' if it has none), name, value, ...
-- Returns {id on the server before the call ('' if none), name, the server's value, ...} for each name that differs.
-- If the id or a name differs, nothing is recorded. Values of `data.files.` are recorded and not compared.
local identity = key('identity')
local id = redis.call('HGET', identity, 'id') or ''
local reply = {id}
for i = 2, #ARGV, 2 do
  local stored = redis.call('HGET', identity, ARGV[i])
  if stored and stored ~= ARGV[i + 1] and string.sub(ARGV[i], 1, 11) ~= 'data.files.' then
    reply[#reply + 1] = ARGV[i]
    reply[#reply + 1] = stored
  end
end
if #reply > 1 or (id ~= '' and ARGV[1] ~= '' and id ~= ARGV[1]) then return reply end
if ARGV[1] ~= '' then redis.call('HSET', identity, 'id', ARGV[1]) end
for i = 2, #ARGV, 2 do redis.call('HSETNX', identity, ARGV[i], ARGV[i + 1]) end
return reply
