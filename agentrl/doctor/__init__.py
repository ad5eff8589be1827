"""`agentrl doctor`: what a run stands on is looked at before it is paid for.

command      the checks, in their order
checkup      one row for each check; what one raises is that row's
records      what a check found
machine      versions, devices, disk
inputs       the run file, tools, data
sandbox      who keeps in the code that a model writes
model        tokenizer, chat template, policy
engine       start, a rollout, the end
memory       given back to the trainer, and taken again
log_probs    the engine's log-probabilities against the trainer's
weight_sync  weights that change, in the engine
"""
