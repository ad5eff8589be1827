"""Every key of a run file: its type, its default, and what it means.

Leaf names are the field's. Models refuse unknown keys and are frozen: what was checked stays true.
`actor`, `ref` and `critic` stand in `agentrl.config.schema.training`, `algorithm` in
`agentrl.config.schema.training`, `reward` in `agentrl.config.schema.reward`, `prepare` in
`agentrl.config.schema.prepare`. Checks across keys live in `agentrl.config.checks`; reading files
in `agentrl.config.load`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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
from agentrl.config.schema.section import FolderOrHubName, ModulePath, Section, Seed, UserPath
from agentrl.config.schema.training import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    RefConfig,
)


class CustomClassConfig(Section):
    """Where a class of the user's own stands."""

    path: ModulePath
    """`package.module` or `path/to/file.py`."""
    name: str
    """The class in it."""


class DataConfig(Section):
    """Which rows, in which order, how long."""

    train_files: list[UserPath] = Field(default_factory=list[Path])
    """Parquet, JSON or JSONL files."""
    val_files: dict[str, UserPath] = Field(default_factory=dict[str, Path])
    """Validation sets by name; the summary's `val_success` is the first's. A list or a single path
    is read as well (named by file stem)."""
    train_batch_size: int = Field(default=256, ge=1)
    """Prompts (groups) of one training step, over all ranks."""
    val_batch_size: int | None = Field(default=None, ge=1)
    """Prompts validated at once; null: all of them."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Tokens of the rendered prompt, at most."""
    max_response_length: int = Field(default=4096, ge=1)
    """Tokens of the whole response: sampled and observed, over all turns."""
    filter_overlong_prompts: bool = True
    """Drop rows whose prompt is longer (the number dropped is told)."""
    filter_num_workers: int | None = Field(default=None, ge=1)
    """Processes of the length filter; null: one for each core."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with an overlong prompt that was not filtered: the side that is cut away."""
    gen_batch_size: int | None = Field(default=None, ge=1)
    """With `algorithm.filter_groups`: prompts of one generation batch, of which as many are taken
    as a step needs; null: `train_batch_size`."""
    prompt_key: str = "prompt"
    """Column of the messages."""
    image_key: str = "images"
    """Column of a row's images. A row that has any is refused: agentrl trains on text alone."""
    video_key: str = "videos"
    """Column of a row's videos; see `image_key`."""
    strict_rows: bool = True
    """Refuse rows that name tools or an interaction though the run has none, and rows with
    `need_tools_kwargs` and no `tools_kwargs`. false: report them, as verl does."""
    reward_fn_key: str = "data_source"
    """Column by which the scorer chooses its rule."""
    shuffle: bool = True
    """Shuffle the rows anew for each epoch (a function of seed and epoch)."""
    seed: Seed = 0
    """Seed of the data's order."""
    train_max_samples: int | None = Field(default=None, ge=1)
    """Use only so many training rows."""
    val_max_samples: int | None = Field(default=None, ge=1)
    """Use only so many rows of each validation set."""
    custom_cls: CustomClassConfig | None = None
    """A dataset class of the user's own: `(files, config, *, max_samples) -> Sequence[dict]`."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra variables of the chat template, such as `enable_thinking`."""
    cache_dir: UserPath | None = None
    """Where measured prompt lengths are cached; null: `~/.cache/agentrl`."""


class ModelConfig(Section):
    """The policy."""

    path: FolderOrHubName
    """A Hugging Face folder (or hub name)."""
    tokenizer_path: FolderOrHubName | None = None
    """The tokenizer, where it is not beside the model."""
    custom_chat_template: str | None = None
    """A template's text, or a path to a `.jinja` file; replaces the tokenizer's own."""
    on_rewritten_history: Literal["error", "keep"] = "error"
    """What to do with a template that rewrites older turns: refuse to start, or go on with the
    tokens as they were sampled."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; the master weights stay in float32. auto: bfloat16 on an accelerator, float32
    on a CPU."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    override_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys of the Hugging Face configuration to replace."""


class MultiTurnConfig(Section):
    """Tools, simulated users and the budgets of a conversation."""

    tool_config_path: UserPath | None = None
    """YAML of tools."""
    function_tool_path: str | None = None
    """Python file or module with `@function_tool` functions."""
    interaction_config_path: UserPath | None = None
    """YAML of interactions."""
    format: str | None = None
    """Tool-call format; null: the one that fits the chat template (its probe says which)."""
    tools_per_row: Literal["all", "tools_kwargs"] = "all"
    """The tools that a row is shown if it has no `extra_info.tool_selection`: every tool of the
    run, or those that the row's `tools_kwargs` name (none if it has no `tools_kwargs`)."""
    on_malformed_call: Literal["observe", "stop", "stop_unreadable", "mask"] = "observe"
    """A malformed call: its error goes back to the model; or the request ends; or it ends if the
    call cannot be read (and not if its tool does not exist, or refuses its arguments); or the error
    goes back and that turn is left out of the loss."""
    check_tool_arguments: bool = True
    """Whether a call whose arguments the tool's JSON Schema refuses is malformed; if not, the tool
    gets the arguments as they are."""
    tool_schema_style: Literal["full", "verl_sync", "verl_async"] = "full"
    """How the policy is shown a tool: `full`, every keyword that was written; `verl_sync` and
    `verl_async`, what verl 0.6.1 shows under that `rollout.mode`: type, description and enum of
    each parameter, and under sync what is absent as null."""
    on_tool_failure: Literal["observe", "fail"] = "observe"
    """A call whose tool crashed (raised anything but `ToolError`), timed out, or was unavailable
    (its circuit breaker is open): the model is told in neutral words and goes on; or the request
    fails by the tool's fault, out of its group's baseline and untrained, and `rollout.failure`
    says what becomes of it."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    """Completions of the policy; null: no limit of its own."""
    max_user_turns: int | None = Field(default=None, ge=0)
    """Replies of the interaction; null: no limit of its own."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Calls of all tools together; null: no limit of its own."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls of one request that run at once; the others queue. Tools that are a plain `def`
    run on threads, at most so many of one request at once."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Sampled tokens of one turn; null: what is left of the response."""
    max_tool_response_length: int = Field(default=1024, ge=1)
    """Tokens of one observation; what is longer is cut, and the cut recorded."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which end is kept, as verl names it: left keeps the beginning, right the end, middle both."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds of one tool call; then its time-out becomes the observation."""
    interaction_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one reply of the interaction."""
    interaction_interval: int = Field(default=1, ge=1)
    """Ask the interaction where the policy's turns so far, those with tool calls included, are a
    multiple of this; an answer that it is not asked about ends the request."""
    interaction_prob: float = Field(default=1.0, ge=0, le=1)
    """Chance that an answer is put to the interaction at all (drawn from the request's seed)."""
    tokenization_sanity_check_mode: Literal["disable", "strict", "ignore_strippable"] = (
        "ignore_strippable"
    )
    """Compare finished ledgers with the rendering of their conversations: `strict` token by token,
    `ignore_strippable` as text, and if that differs in more than white space token by token.
    `strict` also compares with the tokenizer's tokens of the template's own rendering."""
    tokenization_sanity_check_frac: float = Field(default=0.25, gt=0, le=1)
    """Share of the finished requests that are held so, drawn from each request's seed."""


class ValKwargsConfig(Section):
    """How validation samples."""

    n: int = Field(default=1, ge=1)
    """Samples of each validation prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Divides the logits before sampling; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """As `rollout.top_p`."""
    top_k: int = -1
    """As `rollout.top_k`."""


class FailureConfig(Section):
    """What becomes of a request that failed for reasons of the infrastructure."""

    policy: Literal["mask", "retry", "drop_group", "raise"] = "mask"
    """mask: keep its row with a zero mask, out of the group's baseline; retry: try again up to
    `max_retries`, then mask; drop_group: mask its whole group; raise: end the run."""
    max_retries: int = Field(default=1, ge=0)
    """New attempts of one request under `retry`."""
    max_failed_frac: float = Field(default=0.5, ge=0, le=1)
    """End the run where more than this share of a batch failed: then it is no accident."""
    max_failed_calls_frac: float = Field(default=0.5, ge=0, le=1)
    """End the run if more than this share of a tool's calls crashed, timed out or found it down.
    A tool is judged after every 16 calls or more; 1: never."""


class RolloutConfig(Section):
    """Generation: how many, how hot, how long."""

    engine: EngineConfig = EngineConfig()
    n: int = Field(default=8, ge=1)
    """Samples of one prompt (the group)."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits before sampling; the log-probabilities are those of the divided
    logits."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; below 1 it biases
    training, which is reported."""
    top_k: int = -1
    """Sample among so many likeliest tokens; -1: all. A limit biases training, which is
    reported."""
    stop: list[str] = Field(default_factory=list[str])
    """Stop strings beside the template's own end of turn; kept in the output."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and response; null: data.max_prompt_length + data.max_response_length."""
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests in flight on one rank."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Wall clock of one request; null: none."""
    seed: Seed = 0
    """Seed of the engine's sampling and of the requests' own draws."""
    deterministic: bool = False
    """The same seed gives the same run to the last bit, also where it was stopped and resumed: on
    a CPU, on the same machine with as many threads and the same versions. Turns are generated in
    rounds, each of which waits for the slowest tool; what that costs in speed is printed by
    `benchmarks/determinism.py`. The promise ends where `request_timeout_s` fires, and where a
    tool, user or scorer answers otherwise than before (or only sometimes in time)."""
    free_cache_engine: bool = True
    """Where engine and training share an accelerator, the engine gives its memory back while the
    policy is trained: its cache, and its own copy of the weights."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    failure: FailureConfig = FailureConfig()


def _resume_path_by_its_short_name(mode: object) -> object:
    return "resume_path" if mode == "path" else mode


class TrainerConfig(Section):
    """The loop, what it writes, and when."""

    project_name: str = "agentrl"
    """Name of a group of runs."""
    experiment_name: str = "run"
    """Name of this run."""
    default_local_dir: UserPath = Path("runs/run")
    """Everything that a run writes lies under this folder."""
    total_training_steps: int | None = Field(default=None, ge=0)
    """null: `total_epochs` over the data."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training rows; read if `total_training_steps` is null."""
    logger: list[Literal["console", "jsonl", "tensorboard"]] = Field(
        default_factory=lambda: ["console", "jsonl"]
    )
    """Where the figures of each step go."""
    test_freq: int = Field(default=-1, ge=-1)
    """Validate every so many steps; -1: only before and after."""
    save_freq: int = Field(default=-1, ge=-1)
    """Checkpoint every so many steps; -1: only at the end."""
    max_ckpt_to_keep: int | None = Field(default=3, ge=1)
    """How many of the last checkpoints are kept; null: all. The best validated one is kept
    besides."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, and train nothing."""
    resume_mode: Annotated[
        Literal["auto", "disable", "resume_path"], BeforeValidator(_resume_path_by_its_short_name)
    ] = "auto"
    """auto: go on from the last complete checkpoint of the run's folder, if there is one.
    resume_path (or: path): from `resume_from_path`."""
    resume_from_path: UserPath | None = None
    """Folder of one checkpoint (`global_step_N`); read under `resume_mode: resume_path`."""
    rollout_data_dir: UserPath | None = None
    """Save every training rollout as JSONL here."""
    validation_data_dir: UserPath | None = None
    """Save every validation rollout as JSONL here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: an accelerator if there is one."""
    collective_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a rank waits for the others before it ends with an error (verl: `nccl_timeout`).
    Ranks wait behind a rollout for the slowest of them, and while the main one writes: longer than
    that can take."""
    seed: Seed = 0
    """Seed of everything that has no seed of its own."""
    plot: bool = True
    """Draw `curve.png` at the end."""


class RunConfig(Section):
    """A whole run file."""

    plugins: list[str] = Field(default_factory=list[str])
    """Modules (`package.module` or `path/to/file.py`) that every command and rank imports before it
    checks anything. They register estimators, losses, reward managers and tool-call parsers."""
    data: DataConfig
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    prepare: PrepareConfig = PrepareConfig()

    @property
    def prepares_its_policy(self) -> bool:
        """Whether `prepare` makes the model's folder, weights and tokenizer together."""
        made = (self.prepare.tiny_policy, self.prepare.sft)
        folders = {str(section.out_dir) for section in made if section is not None}
        return self.model.path in folders and self.model.tokenizer_path is None

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one generation batch; a step takes one, or several under filter_groups."""
        size = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return size or self.data.train_batch_size
