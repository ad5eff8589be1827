"""`agentrl doctor`: check everything that a run needs before the run is paid for.

command      the checks, in their order
report       one row for each check; an error of a check fails its row only
machine      versions, devices, disk
inputs       the run file, tools, data, sandboxes
model        tokenizer, chat template, policy
engine       engine start, a rollout, engine end
engine_sync  memory that engine and trainer share, weight sync
log_probs    the engine's log-probabilities compared with the trainer's
"""
