"""Ray: place a run's processes on the nodes of a cluster, supervise them, and report on them.

Only this package imports ray (extra `cluster`). What runs in its processes is plain Python.
"""
