"""FSDP2 workers: DataProto -> log-probabilities and new weights; weights -> engine and disk.

`distributed` (the ranks), `model` and `tokenizer` (loading, sharding), `packing`, `attention` and
`log_probs` (how tokens are scored), `batches` (DataProto -> records), `actor`, `policy_loss`,
`optim` (the update), `reference`, `weight_sync`, `checkpoint`, `snapshot` and `rng` (the run on
disk), `tiny_policy`, `demonstrations` and `sft` (a policy to begin with).
"""
