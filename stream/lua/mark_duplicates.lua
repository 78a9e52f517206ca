#!lua flags=allow-oom
-- Let dead letters of prompts that have an outcome in the ledger end nothing. They are duplicates, created when the server
-- lost its last writes; the outcome in the ledger is the one that counts.
-- ARGV: fencing token, then prompt id, outcome in the ledger, ...
-- Returns 1, or 0 if another trainer has taken over.
if not is_trainer(ARGV[1]) then return 0 end
for i = 2, #ARGV, 2 do
  if undo_dead_letter(ARGV[i]) then count_outcome(ARGV[i], ARGV[i + 1]) end
end
return 1
