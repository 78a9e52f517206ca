"""Everything known about a run, as values: each fact is computed in one function, for all screens.

::

    target ──► open_run ──► Run ──┬─► status(), in_flight(), engines(), audit()    its server, or its folder
               name, folder, ..   ├─► groups(), completions(), export()            its archive, unfinished groups
                                  └─► metrics(), summary(), trace()    its files

A run may be running, stopped, killed or finished. Terminal, browser, `--json` and Python show these values.
"""
