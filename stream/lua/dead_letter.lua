#!lua flags=allow-oom
-- Move an entry to the dead letters.
-- ARGV: stage, consumer, id, reason, error
-- Returns 1, or 0 if the lease was lost.
if owner(ARGV[1], ARGV[3]) ~= ARGV[2] then return 0 end
dead_letter(ARGV[1], ARGV[3], ARGV[4], ARGV[5])
wake()
return 1
