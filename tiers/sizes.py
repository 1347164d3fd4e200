"""How small and how large tiers may be; without imports, for whoever reads the configuration."""

LEASE_S = 30.0  # D-M10: how long what a drafter writes is kept for it at a time
SIZE_BYTES_MIN = 64 * 1024
# The file systems that are usual take no larger file, and a process no map of many times that.
LMDB_BYTES_MAX = 16 << 40
# What the map of a cache is of its size: pages of evicted objects are free only two transactions
# later, and values need adjacent pages.
LMDB_MAP_FACTOR = 2
