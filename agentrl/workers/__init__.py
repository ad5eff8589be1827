"""FSDP2 workers: log-probabilities, the update, weight sync, checkpoints, supervised warm-up.

- `distributed`, `rank_status`: the ranks.
- `model`, `tokenizer`: loading and sharding.
- `batches`, `packing`, `attention`, `log_probs`, `scoring`: from a DataProto to token scores.
- `actor`, `policy_loss`, `optim`, `memory`: the update.
- `weight_sync`: new weights to the engine.
- `checkpoint`, `snapshot`, `rng`: the run on disk.
- `demonstrations`, `sft`: the supervised warm-up.
"""
