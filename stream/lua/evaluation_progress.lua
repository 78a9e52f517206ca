#!lua flags=no-writes
-- Read the progress of the current evaluation. Writes nothing.
-- Returns {last id of wake, evaluated policy version (-1: none), prompts not sampled yet, prompts without a result}.
return {
  wake_id(), tonumber(redis.call('HGET', key('eval'), 'version') or -1),
  redis.call('XLEN', key('eval:prompts')), redis.call('HLEN', key('eval:unfinished')),
}
