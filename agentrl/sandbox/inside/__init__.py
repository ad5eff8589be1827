"""Programs that run outside the trainer's process. They use the standard library only.

`spawner.py` and `guest.py` are started as scripts, so Python puts this folder first on the path.
The files therefore import each other by plain names and import nothing else of agentrl. Code in a
sandbox can read them.
"""
