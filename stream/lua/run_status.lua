#!lua flags=no-writes
-- Read the status of the whole run at one moment. Writes nothing.
-- ARGV: `in_flight` to read the reports of workers that hold leases, too
-- Returns {JSON (`RunStatus`), stage, worker, report, stage, worker, report, ...}; a report is not decoded here.
local now = now_ms()
local function hash(name)
  local flat, out = redis.call('HGETALL', key(name)), {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end
local function age(id) return now - tonumber(string.match(id, '^%d+')) end
local status = {now_ms = now, stages = {}, unfinished = redis.call('HLEN', key('unfinished')), outstanding = outstanding(),
  counts = hash('counts'), feed = hash('feed'), policy = hash('policy'), meta = hash('meta'), memory = hash('memory'),
  turns = hash('turns'), latest = redis.call('HGET', key('latest'), 'metrics') or '',
  dead = redis.call('XLEN', key('dead'))}
local function stage_status(stage)
  local stream = key(stage)
  local depth = redis.call('XLEN', stream)
  local s = {depth = depth, claimed = redis.call('ZCARD', stream .. ':leases'),
    delayed = redis.call('ZCARD', stream .. ':retries'), marked = 0, consumers = {}, oldest_age_ms = 0, rate = 0}
  local pending = redis.pcall('XPENDING', stream, GROUP)
  if not pending.err then
    for _, each in ipairs(pending[4] or {}) do s.consumers[each[1]] = tonumber(each[2]) end
    s.marked = s.consumers['marked'] or 0
    s.consumers['marked'], s.consumers['released'] = nil, nil
    s.lag = depth - tonumber(pending[1])
    local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)
    if first[1] then s.oldest_age_ms = age(first[1][1]) end
  else
    s.lag = depth
  end
  local second = math.floor(now / 1000)
  local flat = redis.call('HGETALL', stream .. ':rate')
  local completed, since = 0, second
  for i = 2, #flat, 2 do
    local at = math.floor(flat[i] / 1000000)
    if second - at < 60 then
      completed = completed + flat[i] % 1000000
      since = math.min(since, at)
    end
  end
  s.rate = completed / math.max(1, second - since + 1)
  return s
end
for _, stage in ipairs({'prompts', 'groups', 'scored'}) do status.stages[stage] = stage_status(stage) end
if redis.call('EXISTS', key('eval')) == 1 then
  status.evaluation = hash('eval')
  status.evaluation.unfinished = redis.call('HLEN', key('eval:unfinished'))
  status.evaluation.results = redis.call('HLEN', key('eval:results'))
  status.evaluation.stages = {}
  for _, stage in ipairs({'eval:prompts', 'eval:groups'}) do status.evaluation.stages[stage] = stage_status(stage) end
end
local reports = {}
local function add_reports(stage, consumers)
  status.leases[stage] = table.concat(redis.call('ZRANGE', key(stage .. ':leases'), 0, -1), ' ')
  for consumer in pairs(consumers) do
    local groups = redis.call('GET', key('in_flight:' .. stage .. ':' .. consumer))
    for _, part in ipairs(groups and {stage, consumer, groups} or {}) do reports[#reports + 1] = part end
  end
end
local persistence = redis.call('INFO', 'persistence')
if string.find(persistence, 'aof_last_write_status:err', 1, true) then status.refuses_writes = 'append-only file'
elseif string.find(persistence, 'rdb_last_bgsave_status:err', 1, true) then status.refuses_writes = 'snapshot' end
if ARGV[1] == 'in_flight' then
  status.leases = {}
  for _, stage in ipairs({'prompts', 'groups'}) do add_reports(stage, status.stages[stage].consumers) end
  if status.evaluation then
    for stage, s in pairs(status.evaluation.stages) do add_reports(stage, s.consumers) end
  end
end
table.insert(reports, 1, cjson.encode(status))
return reports
