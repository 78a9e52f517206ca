"""`penstock dashboard`: web pages about runs, rendered here and updated while they are open.

A browser gets HTML. One task per run reads the server once a second while a page is open, and all viewers get the same
rendered parts through server-sent events. Groups come from the run's folder; everything that touches a file runs in a
thread. Looking changes nothing; only with `--allow-changes` can a page retry or drop dead letters.
"""
