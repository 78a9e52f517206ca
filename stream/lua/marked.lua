-- What is marked, but not yet acknowledged.
-- Returns {id, prompt id, id, prompt id, ...}
local marked = {}
for _, id in ipairs(redis.call('ZRANGE', key('scored:marks'), 0, -1)) do
  local flat = fields('scored', id)
  marked[#marked + 1] = id
  marked[#marked + 1] = flat and field(flat, 'prompt') or ''
end
return marked
