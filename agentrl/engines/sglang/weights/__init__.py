"""New weights for running SGLang processes.

sync         one update: pause, transfer, set the version, continue
buckets      weights under the names of the model's files, packed into buffers of bounded size
tensor, distributed, disk    the three transports
"""
