"""What runs outside the trainer's process: scripts of the standard library alone.

`keeper.py` and `guest.py` are started as scripts, which puts this folder first on their path: so
they import one another by plain names, and nothing of agentrl. The guest's code may read them.
"""
