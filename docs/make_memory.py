"""Write docs/memory.md, the arithmetic of memory: `python docs/make_memory.py`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import Qwen2Config

from agentrl.config import parse_config
from agentrl.config.schema.run import RunConfig
from agentrl.doctor.memory import Machine, MemoryPlan, ModelSize, find_remedy, plan_memory

PAGE = Path(__file__).resolve().parent / "memory.md"
DEVICE_BYTES = 80 * 10**9
HOST_BYTES = 2 * 10**12
DEVICES = (1, 4, 8)
MODELS = {
    "1.5B": Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "32B": Qwen2Config(
        vocab_size=152_064, hidden_size=5120, intermediate_size=27_648, num_hidden_layers=64,
        num_attention_heads=40, num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Shapes of Qwen2.5."""
HEAD = """# Memory

What a run needs on each device and in the host, for three models on devices of 80 GB. This page is
written by `docs/make_memory.py` with the function (`agentrl/doctor/memory.py`) that
`agentrl doctor run.yaml` uses for its row `memory`, before it loads anything. It reads the model's
`config.json` and the run file, no weights.

The run of the table: bfloat16 with AdamW, prompts of 1,024 and responses of 4,096 tokens,
micro-batches of 16,384 tokens (the default), SGLang in the trainer's process, and
`model.enable_gradient_checkpointing: true`. GB are 10^9 bytes.

"""
FORMULAS = """
"Fits" means that each peak is at most 90 % of the device, that the engine's weights fit into its
share, and that the host has 2 TB. The rest of a device is for kernels, their libraries and gaps
between tensors. "no" is followed by the fewest changes with which the run fits.

## The parts

W is the number of weights, n of the devices that shard one copy of them
(`actor.fsdp_config.fsdp_size`; by default all), c the bytes of the compute dtype (2 for bfloat16, 4
for float32), H the hidden width, I the width of the MLP, Q and K the widths of all queries and of
all keys of a token. Bytes on each device:

- **weights, gradients**: 4 W / n each. The master weights and what is accumulated are float32.
- **moments**: 8 W / n for AdamW. Muon has one moment for each weight of a matrix.
- **reference**: 4 W / n, if a KL term needs it.
- **LoRA**: W counts base and adapters. Gradients and moments are those of the adapters only, and
  the reference is the policy itself, if `ref.path` is not set.
- **critic**: weights, gradients and moments of its own, with W of its body, which has no head of
  the vocabulary. Policy and critic are updated one after the other: gradients, gathered weights
  and activations are those of the larger update, and the critic has no logits.
- **gathered**: c for each weight of two decoder layers (one is gathered ahead) and of embeddings,
  last norm and head. In addition their gradients before they are reduced: c for each weight of
  embeddings and head, c + 4 for each of a layer. Nothing if one device computes in float32 without
  offload.
- **activations**: for each token of a micro-batch on one rank (at least the longest row, or its
  `ulysses_sequence_parallel_size`th part) and each layer, 2 H (4 + 2 c) for two norms, 2 c (Q + K)
  for the attention and 4 c I for the MLP. With checkpointing c H for each layer, and all of one
  layer. Then c (3 I + 2 H) for each token while a layer is computed backward.
- **pictures**, of a vision-language model: c H for each token of a picture, at most all tokens of
  a micro-batch; Qwen3-VL has several such vectors. If the tower is trained, also its activations:
  for each patch and block, c for each input and output of the linear modules, and two norms (with
  checkpointing the input of each block, and all of one block). A frozen tower keeps none, has no
  gradients and moments, and keeps up to 1 GiB of features in the host. W counts the tower.
- **logits**: 2.5 times `actor.logits_block_bytes`.
- **engine**, SGLang: `mem_fraction_static` (0.5) of what the trainer leaves free. c W / `tp_size`
  and the cache of one sequence must fit into it.
- **engine**, embedded: c W if the weights are sharded or of another dtype, and a cache of 2 c K for
  each token and layer (2.5 times that on a CPU), at most 30 % of the free memory.

The engine's memory is free during the update (`rollout.free_cache_engine`), except on a CPU. In
host memory each rank has a copy of its part of weights and moments while a checkpoint is written.
With `actor.fsdp_config.offload_policy` weights, gradients, moments and reference are in host
memory, not on the device. With `param_offload` (weights, reference) and `optimizer_offload`
(moments) they are there during the rollout and the update of the other model; with
`model.enable_activation_offload` the device has the activations of one layer. The critic's keys of
the same names are below `critic.fsdp_config` and `critic.model`.

Not counted: tensors of a batch (8 bytes for each token and column), tools, and what SGLang's
processes keep outside of their share. Two peaks of a run with SGLang on the training devices are
not counted either, so leave a margin (a lower `mem_fraction_static`): SGLang takes its share of
what is free when it starts, before the reference is loaded and before moments exist; and while a
checkpoint is copied, offloaded weights and moments of policy and critic are on the device
together.

## Checked against tensors

`tests/doctor/test_memory.py` compares the formulas with the bytes of the tensors of two small
models on a CPU. What a forward pass keeps agrees within 5 % in float32 and bfloat16. The peak of a
whole update with AdamW, with and without checkpointing, agrees within 15 %. No peak of a GPU was
measured yet.
"""


def run_config() -> RunConfig:
    """Return the run of the table."""
    return parse_config(
        {
            "data": {
                "train_files": ["train.parquet"],
                "max_prompt_length": 1024,
                "max_response_length": 4096,
            },
            "model": {"path": "model", "enable_gradient_checkpointing": True},
        }
    )


def gb(num_bytes: int) -> str:
    """Return a number of bytes for the table."""
    return f"{num_bytes / 1e9:.1f}"


def cells(plan: MemoryPlan) -> list[str]:
    """Return the figures of a row."""
    sizes = {part.name: part.num_bytes for part in plan.parts}
    states = sizes["weights"] + sizes["moments"] + sizes["gradients"]
    return [
        gb(states),
        gb(sizes["gathered"]),
        gb(sizes["activations"]),
        gb(sizes["logits"]),
        f"**{gb(plan.update_bytes)}**",
        gb(sizes["engine: SGLang"]),
        f"**{gb(plan.rollout_bytes)}**",
        gb(plan.host_bytes),
    ]


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    titles = ["model", "devices", "weights, gradients, moments", "gathered", "activations",
              "logits", "update", "SGLang", "rollout", "host, for each rank", "fits"]  # fmt: skip
    yield "| " + " | ".join(titles) + " |"
    yield "| " + " | ".join("---" for _ in titles) + " |"
    config = run_config()
    for name, shape in MODELS.items():
        size = ModelSize.of(shape)
        base = Machine(num_devices=1, device_bytes=DEVICE_BYTES, host_bytes=HOST_BYTES)
        for devices in DEVICES:
            machine = replace(base, num_devices=devices)
            plan = plan_memory(size, config, machine, engine="sglang")
            fits = "yes"
            if not plan.fits(machine):
                fits = f"no; {find_remedy(size, config, machine, engine='sglang')}"
            yield "| " + " | ".join([name, str(devices), *cells(plan), fits]) + " |"


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(rows()) + "\n" + FORMULAS


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
