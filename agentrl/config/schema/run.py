"""The keys of a run file: data, model, rollout, loop, and the whole file.

Leaf names are those of the field. The sections refuse unknown keys and are frozen, so that what was
checked stays true. The other modules of this package have the other sections.
`agentrl.config.checks` checks several keys together; `agentrl.config.load` reads files.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.cluster import ClusterConfig, PoolConfig
from agentrl.config.schema.engine import (
    EngineConfig,
    WeightSyncConfig,
)
from agentrl.config.schema.prepare import (
    PrepareConfig,
)
from agentrl.config.schema.reward import (
    RewardConfig,
)
from agentrl.config.schema.section import (
    FolderOrHubName,
    ModulePath,
    PathOrUrl,
    Section,
    Seed,
    Url,
    UserPath,
)
from agentrl.config.schema.training import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    RefConfig,
)


class CustomClassConfig(Section):
    """A class of the user, by module and name."""

    path: ModulePath
    """`package.module` or `path/to/file.py`."""
    name: str
    """The name of the class in it."""


_TEMPLATE_ARGUMENTS = frozenset({
    "continue_final_message", "add_generation_prompt", "tokenize", "return_dict", "return_tensors",
    "return_assistant_tokens_mask", "padding", "max_length", "truncation",
})  # fmt: skip


class DataConfig(Section):
    """The rows, their order and their length."""

    train_files: list[UserPath] = Field(default_factory=list[Path])
    """Parquet, JSON or JSONL files."""
    val_files: dict[str, UserPath] = Field(default_factory=dict[str, Path])
    """Validation sets by name; the summary's `val_success` is that of the first. A list or a single
    path is allowed too (the names are the file stems)."""
    train_batch_size: int = Field(default=256, ge=1)
    """Prompts (groups) of one training step, over all ranks."""
    val_batch_size: int | None = Field(default=None, ge=1)
    """Prompts that are validated at the same time; null: all of them."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Most tokens of the rendered prompt."""
    max_response_length: int = Field(default=4096, ge=1)
    """Most tokens of the whole response: sampled and observed, over all turns."""
    filter_overlong_prompts: bool = True
    """Drop rows with a longer prompt, and report their number."""
    filter_num_workers: int | None = Field(default=None, ge=1)
    """Processes of the length filter; null: one for each core."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """How to treat an overlong prompt that was not filtered: an error, or the side that is cut."""
    gen_batch_size: int | None = Field(default=None, ge=1)
    """With `algorithm.filter_groups`: prompts of one generation batch. A step takes as many batches
    as it needs. null: `train_batch_size`."""
    prompt_key: str = "prompt"
    """Column of the messages."""
    image_key: str = "images"
    """Column of a row's images, in the order of `<image>` in the texts of its messages. The model
    must read images."""
    video_key: str = "videos"
    """Column of a row's videos, in the order of `<video>`; see `image_key`."""
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the model's processor of images and videos, such as `size`."""
    strict_rows: bool = True
    """Refuse rows that name tools or an interaction if the run has none, and rows with
    `need_tools_kwargs` and no `tools_kwargs`. false: report them, as verl does."""
    reward_fn_key: str = "data_source"
    """Column that chooses the scorer."""
    shuffle: bool = True
    """Shuffle the rows in each epoch (a function of seed and epoch)."""
    seed: Seed = 0
    """Seed of the order of the rows."""
    train_max_samples: int | None = Field(default=None, ge=1)
    """Use only this many training rows, the first ones; null: all."""
    val_max_samples: int | None = Field(default=None, ge=1)
    """Use only this many rows of each validation set, the first ones; null: all."""
    custom_cls: CustomClassConfig | None = None
    """A dataset class of the user: `(files, config, *, max_samples) -> Sequence[dict]`."""
    sampler: CustomClassConfig | None = None
    """A class of the user that orders the training rows, built with `data_source` and
    `data_config`: each epoch iterates over it once. `update(batch)`, if it has one, gets the batch
    of each step. null: `shuffle` and `seed` order them."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra variables of the chat template, such as `enable_thinking`."""

    @field_validator("apply_chat_template_kwargs")
    @classmethod
    def _refuse_arguments(cls, given: dict[str, Any]) -> dict[str, Any]:
        if names := sorted(_TEMPLATE_ARGUMENTS & given.keys()):
            reason = (
                f"{', '.join(names)}: an argument of transformers and no variable of a template; a "
                "prompt always ends with the generation prompt, so an answer is never continued"
            )
            raise ValueError(reason)
        return given

    cache_dir: UserPath | None = None
    """Folder of the cache of prompt lengths; null: `~/.cache/agentrl`."""


class ModelConfig(Section):
    """The policy."""

    path: FolderOrHubName
    """A Hugging Face folder (or hub name)."""
    tokenizer_path: FolderOrHubName | None = None
    """The folder of the tokenizer; null: the model's."""
    custom_chat_template: str | None = None
    """A template's text, or a path to a `.jinja` file; replaces the tokenizer's own."""
    on_rewritten_history: Literal["error", "keep"] = "error"
    """How to treat a template that rewrites older turns: refuse to start, or keep the tokens as
    they were sampled."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; the master weights stay in float32. auto: bfloat16 on an accelerator, float32
    on a CPU. On a CPU with AVX-512 BF16 or AMX, bfloat16 makes an update of 5 million weights 1.3
    times as fast; in the quick start, engine and trainer then differ by 4e-4 nats per token (at
    most 0.2) instead of 4e-7."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    enable_activation_offload: bool = False
    """Keep activations in host memory between the forward and the backward pass; with
    `enable_gradient_checkpointing`, those that are not recomputed."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of new LoRA adapters: the base is frozen, and only the adapters are trained (needs
    peft). 0: every weight is trained."""
    lora_alpha: int = Field(default=16, ge=1)
    """An adapter adds `lora_alpha / lora_rank` times the product of its two matrices."""
    target_modules: str | list[str] = "all-linear"
    """The modules with an adapter: `all-linear` (all linear modules of the decoder), a list of
    names or ends of names (`q_proj`), or a regular expression that matches whole names. A vision
    tower has no adapters."""
    exclude_modules: str | list[str] | None = None
    """Modules without an adapter, written as in `target_modules`."""
    lora_adapter_path: FolderOrHubName | None = None
    """A saved adapter in peft's format, which is trained further; it has its own rank, alpha and
    modules."""
    freeze_vision_tower: bool = True
    """Train only the language part of a vision-language model: its tower, with the merger or
    projector, keeps its weights. The features of a picture are then computed once for all passes
    over a batch. Also for the critic. Without effect on a model of text."""
    trust_remote_code: bool = False
    """Run code that is part of the model's folder."""
    override_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Replacements for keys of the Hugging Face configuration. For a vision-language model, the
    keys of its language part too, and mappings for its parts (`vision_config`)."""

    @property
    def has_lora(self) -> bool:
        """Whether adapters are trained, and the weights of the base are frozen."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def without_lora(self) -> "ModelConfig":
        """Return the same model without adapters."""
        return self.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})


class CompactionConfig(Section):
    """Replacement of a long history by a summary that the policy writes, and that is trained."""

    trigger_tokens: int = Field(ge=1)
    """Ask for a summary when prompt, response and the next observation have this many tokens
    together. After the trigger the observation, the instruction and the summary must still fit into
    `data.max_response_length` and the model's length."""
    instruction: str = Field(
        min_length=1,
        default="Your context is almost full. Write a summary of the work so far: what was asked, "
        "what you found, and what remains to be done. It replaces the conversation after the task.",
    )
    """The user message that asks for the summary."""
    heading: str = "Summary of the work so far:"
    """The line before the summary, in the last user message of the prompt."""
    max_summary_tokens: int = Field(default=512, ge=1)
    """Most sampled tokens of a summary; a longer one is cut, and the cut is recorded."""
    keep_turns: int = Field(default=0, ge=0)
    """Last turns of the policy, with their results, that follow the summary word by word."""
    max_compactions: int = Field(default=16, ge=1)
    """Most summaries of one trajectory; the sequence after the last one ends at its limits."""


class MultiTurnConfig(Section):
    """Tools, simulated users and the budgets of a conversation."""

    tool_config_path: UserPath | None = None
    """YAML of tools."""
    function_tool_path: str | None = None
    """Python file or module with `@function_tool` functions."""
    interaction_config_path: UserPath | None = None
    """YAML of interactions."""
    format: str | None = None
    """Tool-call format; null: the format that the probe of the chat template finds."""
    tools_per_row: Literal["all", "tools_kwargs"] = "all"
    """The tools of a row without `extra_info.tool_selection`: every tool of the run, or those that
    its `tools_kwargs` name (none if it has no `tools_kwargs`)."""
    on_malformed_call: Literal["observe", "stop", "stop_unreadable", "mask"] = "observe"
    """A malformed call. observe: the model gets its error; stop: the request ends;
    stop_unreadable: the request ends if the call cannot be parsed (not if its tool is unknown or
    refuses the arguments); mask: the model gets the error, and the turn is left out of the loss."""
    check_tool_arguments: bool = True
    """Treat a call as malformed if the tool's JSON Schema refuses its arguments. false: the tool
    gets the arguments as they are."""
    tool_schema_style: Literal["full", "verl_sync", "verl_async"] = "full"
    """The part of a tool's schema that the policy gets. full: every keyword; verl_sync and
    verl_async: as verl 0.6.1 under that `rollout.mode`, type, description and enum of each
    parameter, and under sync null for what is absent."""
    on_tool_failure: Literal["observe", "fail"] = "observe"
    """A call whose tool crashed (raised anything but `ToolError`), timed out, or was unavailable
    (its circuit breaker is open). observe: the model gets a neutral message and continues; fail:
    the request fails by the tool's fault, outside its group's baseline and untrained, and
    `rollout.failure` decides what happens to it."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    """Most completions of the policy; null: no such limit."""
    max_user_turns: int | None = Field(default=None, ge=0)
    """Most replies of the interaction; null: no such limit."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Most calls of all tools together; null: no such limit."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls of one request that run at the same time; the others wait. Tools with a plain `def` run
    on threads, at most this many of one request at the same time."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Most sampled tokens of one turn; null: the rest of the response."""
    max_tool_response_length: int = Field(default=1024, ge=1)
    """Most tokens of one observation; a longer one is cut, and the cut is recorded."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The part that is kept, by verl's names: left keeps the beginning, right the end, middle
    both."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Most seconds of one tool call; after a time-out the observation says so."""
    interaction_timeout_s: float = Field(default=60.0, gt=0)
    """Most seconds of one reply of the interaction."""
    interaction_interval: int = Field(default=1, ge=1)
    """Call the interaction if the number of the policy's turns so far, with those that call tools,
    is a multiple of this; an answer without such a call ends the request."""
    interaction_prob: float = Field(default=1.0, ge=0, le=1)
    """Probability that the interaction gets an answer (drawn from the request's seed)."""
    compaction: CompactionConfig | None = None
    """Replacement of a long history by a summary; null: a sequence ends at its limits."""
    tokenization_sanity_check_mode: Literal["disable", "strict", "ignore_strippable"] = (
        "ignore_strippable"
    )
    """Compare finished ledgers with the rendering of their conversations: `strict` token by token,
    `ignore_strippable` as text, and if that differs in more than white space token by token.
    `strict` also compares with the tokenizer's tokens of the template's own rendering."""
    tokenization_sanity_check_frac: float = Field(default=0.25, gt=0, le=1)
    """Share of the finished requests that are compared, drawn from each request's seed."""


class ValKwargsConfig(Section):
    """Sampling in validation."""

    n: int = Field(default=1, ge=1)
    """Samples of each validation prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Divides the logits before sampling; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """As `rollout.top_p`."""
    top_k: int = -1
    """As `rollout.top_k`."""


class FailureConfig(Section):
    """The treatment of a request that failed for reasons of the infrastructure."""

    policy: Literal["mask", "retry", "drop_group", "raise"] = "mask"
    """mask: keep its row with a zero mask, out of the group's baseline; retry: try again up to
    `max_retries`, then mask; drop_group: mask its whole group; raise: end the run."""
    max_retries: int = Field(default=1, ge=0)
    """Most new attempts of one request under `retry`."""
    max_failed_frac: float = Field(default=0.5, ge=0, le=1)
    """End the run if more than this share of a batch failed."""
    max_failed_calls_frac: float = Field(default=0.5, ge=0, le=1)
    """End the run if more than this share of a tool's calls crashed, timed out or found the tool
    unavailable. The share is computed after every 16 calls or more. 1: never."""


class RolloutConfig(Section):
    """Generation: number of samples, sampling parameters, limits."""

    engine: EngineConfig = EngineConfig()
    n: int = Field(default=8, ge=1)
    """Samples of one prompt (the group)."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits before sampling; log-probabilities are those of the divided logits."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability. A value below 1
    biases training, which is reported."""
    top_k: int = -1
    """Sample from this many of the most likely tokens; -1: all. A limit biases training, which is
    reported."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list[str])
    """Stop strings in addition to the template's end of turn; they stay in the output."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response; null: the sum of `data.max_prompt_length` and
    `data.max_response_length`."""
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Most requests in flight on one rank."""
    num_workers: int | None = Field(default=None, ge=1)
    """Processes that drive the requests of all ranks, spread over the nodes of a Ray cluster (verl:
    `agent.num_workers`): tools, parsers, templates and scorers. null: each training rank drives its
    own requests."""
    worker_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without an answer after which a rollout worker counts as hanging. It is replaced, and
    its requests begin again on others. Read if `num_workers` is set."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Most seconds of one request; null: no limit."""
    seed: Seed = 0
    """Seed of the engine's sampling and of the random decisions of requests."""
    deterministic: bool = False
    """The same seed gives the same run to the last bit, also if it was stopped and resumed: on a
    CPU, on the same machine with the same number of threads and the same versions. Turns are
    generated in rounds, and each round waits for the slowest tool; `benchmarks/determinism.py`
    measures the cost. The promise does not hold if `request_timeout_s` fires, or if a tool, user or
    scorer gives other answers than before (or only sometimes in time)."""
    free_cache_engine: bool = True
    """If engine and training share an accelerator, the engine frees its memory during the update:
    its cache, and its own copy of the weights."""
    agent: AgentConfig = AgentConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    failure: FailureConfig = FailureConfig()


def _resume_path_by_its_short_name(mode: object) -> object:
    return "resume_path" if mode == "path" else mode


def _off_if_false(value: object) -> object:
    return "off" if value is False else value  # what YAML 1.1 reads for a bare off


TrackerName = Literal["wandb", "mlflow", "swanlab", "trackio"]
"""Trackers of runs: each is the name of a logger and of the extra with its package."""


class AlertRule(Section):
    """A metric and the values of it that are worth a warning."""

    metric: str
    """Name of the metric, as in `metrics.jsonl`."""
    above: float | None = None
    """Warn if the metric is greater."""
    below: float | None = None
    """Warn if the metric is smaller."""

    @model_validator(mode="after")
    def _has_a_threshold(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError("a rule needs `above` or `below`")
        return self

    def is_met(self, value: float) -> bool:
        """Whether a value is worth a warning."""
        is_above = self.above is not None and value > self.above
        return is_above or (self.below is not None and value < self.below)

    def describe(self) -> str:
        """Describe the rule in one line."""
        limits = {"above": self.above, "below": self.below}
        named = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
        return f"{self.metric} {' or '.join(named)}"


class AlertsConfig(Section):
    """Warnings about the metrics of a step. Each is given once, until its reason is over."""

    window: int = Field(default=5, ge=1)
    """Steps over which reward and entropy are averaged. A share is compared in each step; only its
    lowest mean is averaged."""
    reward_fall: float | None = Field(default=0.5, gt=0)
    """Warn if the mean reward is below its best by more than this share of it (of its rise, if that
    is larger), and by more than its noise; null: never."""
    entropy_fall: float | None = Field(default=0.9, gt=0, le=1)
    """Warn if the policy's entropy has lost more than this share of its first value; null:
    never."""
    failed_frac: float | None = Field(default=0.2, ge=0, le=1)
    """Warn if the share of requests that failed is above this. If its lowest mean over a window is
    itself above this, or more than 0.2 below it, the limit is 0.2 above that mean; null: never."""
    truncated_frac: float | None = Field(default=0.5, ge=0, le=1)
    """Warn if the share of responses that were cut at a length is above this. If its lowest mean
    over a window is itself above this, or more than 0.2 below it, the limit is 0.2 above that mean;
    null: never."""
    drift: float | None = Field(default=0.05, gt=0)
    """Warn if the KL between engine and trainer (`rollout_corr/k3_kl`, nats per token) is greater;
    null: never."""
    no_signal: bool = True
    """Call `command` and `webhook_url` if no group of a step has a learning signal. The console
    says so in any case."""
    rules: list[AlertRule] = Field(default_factory=list[AlertRule])
    """Thresholds of other metrics."""
    command: str | None = None
    """A command of the shell for each warning; it reads JSON on its standard input: `run`, `step`,
    `metric`, `value`, `message`. It is not waited for."""
    webhook_url: str | None = None
    """A URL that gets the same by POST."""


class TracingConfig(Section):
    """Traces: the spans of each request, and of the phases of each step."""

    exporters: list[Literal["file", "otlp"]] = Field(default_factory=list[Literal["file", "otlp"]])
    """Where traces go. file: `traces/step_N.json` in the run's folder, which Perfetto opens; otlp:
    a collector of OpenTelemetry (extra `otel`). Empty: there are no traces."""
    freq: int = Field(default=1, ge=1)
    """Trace every so many steps, with their validation."""
    endpoint: str | None = None
    """Base URL of the collector, such as `http://localhost:4318`; null: by the environment
    (`OTEL_EXPORTER_OTLP_ENDPOINT`), or port 4318 of this machine."""


class ProfilerConfig(Section):
    """`torch.profiler` in chosen steps."""

    steps: list[int] = Field(default_factory=list[int])
    """Training steps that are profiled, counted from 1."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks that are profiled."""
    activities: list[Literal["cpu", "cuda"]] | None = None
    """What is recorded; null: what the rank's device has."""
    with_rollout: bool = False
    """Profile the rollout too. An embedded engine runs thousands of passes in it, which need much
    memory and a large file."""
    folder: UserPath | None = None
    """Folder of the files; null: `profiles` in the run's folder."""


class TrainerConfig(Section):
    """The training loop, its outputs and their intervals."""

    project_name: str = "agentrl"
    """Name of a group of runs, also in trackers."""
    experiment_name: str = "run"
    """Name of this run, also in trackers."""
    default_local_dir: UserPath = Path("runs/run")
    """The folder of everything that a run writes. With ranks on several nodes it is a folder that
    all of them see, or `default_remote_dir` is set."""
    default_remote_dir: Url | None = None
    """URL of a folder for checkpoints and the exported policy, in a store that all nodes reach:
    `s3://bucket/runs/a`, `gs://...`, `hdfs://...`, or another protocol of fsspec (verl:
    `default_hdfs_dir`). The run resumes from there. Logs, metrics and rollouts stay in
    `default_local_dir`, and so does a copy of the exported policy. null: all is in
    `default_local_dir`."""
    total_training_steps: int | None = Field(default=None, ge=0)
    """null: `total_epochs` over the data."""
    critic_warmup: int = Field(default=0, ge=0)
    """First steps in which the critic is trained and the policy is not."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training rows; read if `total_training_steps` is null."""
    logger: list[Literal["console", "jsonl", "tensorboard", TrackerName]] = Field(
        default_factory=lambda: ["console", "jsonl"]
    )
    """Outputs of the metrics of each step; `jsonl` is always written. `wandb`, `mlflow`, `swanlab`
    and `trackio` need the extra of that name, and the login of their services unless they write to
    this machine."""
    log_val_generations: int = Field(default=0, ge=0)
    """Rollouts of each validation that trackers show as a table: prompt, response, reward, stop
    reason. The same prompts each time."""
    log_train_generations: int = Field(default=0, ge=0)
    """Training rollouts of each step that trackers show as a table."""
    test_freq: int = Field(default=-1, ge=-1)
    """Validate every so many steps; -1: only before and after."""
    save_freq: int = Field(default=-1, ge=-1)
    """Checkpoint every so many steps; -1: only at the end."""
    max_ckpt_to_keep: int | None = Field(default=3, ge=1)
    """How many of the last checkpoints are kept, in addition to the best validated one; null:
    all."""
    export: Literal["merged", "adapter"] = "merged"
    """What `trained/` has if LoRA trains the policy. merged: the whole model, for every program;
    adapter: the adapter alone, which peft loads on top of the base."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, and train nothing."""
    resume_mode: Annotated[
        Literal["auto", "disable", "resume_path"], BeforeValidator(_resume_path_by_its_short_name)
    ] = "auto"
    """auto: resume from the last complete checkpoint of the run's folder, if there is one.
    resume_path (or: path): resume from `resume_from_path`. disable: start again."""
    resume_from_path: PathOrUrl | None = None
    """Folder or URL of one checkpoint (`global_step_N`), for `resume_mode: resume_path`."""
    rollout_data_dir: UserPath | None = None
    """Folder for all training rollouts, as JSONL, and for what training computed for their tokens,
    as Parquet; null: they are not saved."""
    compress_rollouts: bool = True
    """Compress the JSONL files of rollouts with zstd: `step_N.jsonl.zst`. False: `step_N.jsonl`."""
    weight_digests: bool = True
    """With `rollout_data_dir`, hash the policy's trained weights after each step, with LoRA those
    of the adapters: `agentrl audit` compares checkpoints with them."""
    validation_data_dir: UserPath | None = None
    """Folder for all validation rollouts, as JSONL; null: they are not saved."""
    nnodes: int = Field(default=1, ge=1)
    """Nodes of a Ray cluster that train. Under torchrun, its own arguments decide."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Training ranks on each node, one for each device. With more than one rank in all, the run
    uses Ray, unless it runs under torchrun. With `device: cpu` a device is one CPU."""
    max_restarts: int = Field(default=0, ge=0)
    """How often the training ranks of a run on Ray are started again, from the last checkpoint,
    after one of them was lost. 0: the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: an accelerator if there is one."""
    collective_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a rank waits for the others before it ends with an error (verl: `nccl_timeout`).
    Ranks wait for the slowest one after a rollout, and while the main rank writes. Choose a longer
    time than these take. A checkpoint fails if a rank's file does not grow for this time."""
    alerts: AlertsConfig = AlertsConfig()
    tracing: TracingConfig = TracingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device in 10^12 operations per second, for the metric `perf/mfu`; null: by the
    device's name. Without it, as on a CPU, there is no such metric."""
    seed: Seed = 0
    """Seed of everything that has no other seed."""
    plot: bool = True
    """Draw `curve.png` at the end."""
    progress: Annotated[Literal["auto", "live", "plain", "off"], BeforeValidator(_off_if_false)] = (
        "auto"
    )
    """What shows the progress of long work. auto: `live` in a terminal, else `plain`. live: bars
    below the lines of the run. plain: a line a minute about work that takes longer than that. off:
    nothing."""


def _empty_if_null(section: object) -> object:
    return {} if section is None else section


class RunConfig(Section):
    """A whole run file."""

    plugins: list[str] = Field(default_factory=list[str])
    """Modules (`package.module` or `path/to/file.py`) that every command and rank imports first.
    They register estimators, losses, reward managers and tool-call parsers."""
    data: DataConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: Annotated[CriticConfig, BeforeValidator(_empty_if_null)] = CriticConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    prepare: PrepareConfig = PrepareConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def pools(self) -> list[PoolConfig]:
        """The pools of a run on Ray: the declared ones, or one for all roles."""
        return self.cluster.pools or [
            PoolConfig(
                name="main",
                nodes=self.trainer.nnodes,
                devices_per_node=self.trainer.n_gpus_per_node,
                roles=["train", "engine", "rollout"],
            )
        ]

    @property
    def num_ranks(self) -> int:
        """Training ranks that the run file asks for; torchrun's own number replaces it."""
        pools = (pool for pool in self.pools if "train" in pool.roles)
        return sum(pool.nodes * pool.devices_per_node for pool in pools)

    @property
    def asks_for_cluster(self) -> bool:
        """Whether the run uses Ray, unless it runs under torchrun."""
        return (
            bool(self.cluster.pools)
            or self.cluster.address is not None
            or self.num_ranks > 1
            or (self.rollout.num_workers or 1) > 1
        )

    @property
    def has_own_servers(self) -> bool:
        """Whether the run's cluster starts its SGLang servers."""
        engine = self.rollout.engine
        return (
            self.asks_for_cluster
            and engine.name == "sglang_server"
            and not engine.sglang_server.addresses
        )

    @property
    def servers_share_devices(self) -> bool:
        """Whether servers of the cluster and training ranks use the same devices, in turns."""
        return any({"train", "engine"} <= set(pool.roles) for pool in self.pools)

    @property
    def prepares_its_policy(self) -> bool:
        """Whether `prepare` makes the model's folder, with weights and tokenizer."""
        made = (self.prepare.tiny_policy, self.prepare.sft)
        # `model.path` may be absolute by now (`with_absolute_paths`).
        folders = {section.out_dir.absolute() for section in made if section is not None}
        is_made = Path(self.model.path).absolute() in folders
        return is_made and self.model.tokenizer_path is None

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one generation batch; under `filter_groups` a step may take several
        batches.
        """
        size = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return size or self.data.train_batch_size
