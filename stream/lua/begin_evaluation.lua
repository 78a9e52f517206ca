#!lua
-- Begin an evaluation: delete the previous one and queue the evaluation prompts.
-- ARGV: fencing token, policy version, step, digest of the settings that must have made the prompts
-- Returns {1, prompts} · {0, last id of wake} if the feeder has not uploaded those prompts yet · {-1} if another trainer has
--         taken over.
-- A repeated call begins the evaluation again.
if not is_trainer(ARGV[1]) then return {-1} end
if redis.call('HGET', key('eval'), 'settings') ~= ARGV[4] then return {0, wake_id()} end
delete_evaluation()
local prompts = redis.call('HKEYS', key('eval:dataset'))
table.sort(prompts, function(a, b) -- ids end in the row's number
  if #a ~= #b then return #a < #b end
  return a < b
end)
for _, prompt in ipairs(prompts) do
  local payload = redis.call('HGET', key('eval:dataset'), prompt)
  local id = redis.call('XADD', key('eval:prompts'), '*', 'prompt', prompt, 'payload', payload, 'version', ARGV[2])
  set_current(prompt, 'eval:prompts', id)
end
redis.call('HDEL', key('eval'), 'finished')
redis.call('HSET', key('eval'), 'version', ARGV[2], 'step', ARGV[3], 'total', #prompts)
wake()
return {1, #prompts}
