"""Child processes with limits: a killable worker pool, and the launcher of the Python sandbox.

===================  ==================================================================
`pool.py`            a pool of child processes and its queue of jobs
`child_process.py`   the parent's side of one child: run jobs, enforce deadlines, kill
`jobs.py`            jobs, their results and errors
`child_main.py`      the child's side: run one job after another in the main thread
`confine.py`         set resource limits, then replace this process by another program
`isolation.py`       what children find of the machine: everything, no environment, or a sandbox
`forked.py`          in a child: run one piece of work in a fork
`shared_pools.py`    pools that any thread may use, for environments
===================  ==================================================================
"""
