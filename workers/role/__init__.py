"""What all roles share at run time: their context, the work loop, concurrency limits, watchdogs and logging."""
