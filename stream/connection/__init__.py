"""The connection to a run's Redis server: addresses, cluster nodes, retries, key names."""
