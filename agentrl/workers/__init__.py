"""FSDP2 workers: log-probabilities, the update, weight sync, checkpoints, supervised warm-up.

- `distributed`, `rank_status`: the ranks.
- `load`, `model`, `value_model`, `lora`, `tokenizer`: loading and sharding.
- `batches`, `packing`, `attention`, `log_probs`, `scoring`: from a DataProto to token scores.
- `reward_model`: scores of whole conversations.
- `update`, `actor`, `critic`, `policy_loss`, `optim`, `memory`: the update.
- `weight_sync`: new weights to the engine.
- `checkpoint`, `snapshot`, `export`, `rng`: the run on disk.
- `demonstrations`, `sft`: the supervised warm-up.
"""
