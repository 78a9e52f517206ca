"""Models and data sets by their names on a hub: bound to a commit once, and downloaded before anything starts."""
