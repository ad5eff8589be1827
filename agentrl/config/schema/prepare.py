"""Keys of what `agentrl train` makes first (data, a small policy, a supervised warm-up), and of
what else `agentrl prepare` makes.
"""

from typing import Literal

from pydantic import Field

from agentrl.config.schema.section import FolderOrHubName, Section, Seed, UserPath
from agentrl.config.schema.training import OptimConfig


class ArithmeticConfig(Section):
    """Word problems of one to three steps in the format of GSM8K, made from a seed."""

    out_dir: UserPath
    """Folder of the files."""
    seed: Seed = 0
    """Seed of the problems."""
    num_train: int = Field(default=2048, ge=1)
    """Training problems."""
    num_val: int = Field(default=256, ge=1)
    """Problems of each validation set."""
    num_demos: int = Field(default=16000, ge=0)
    """Demonstrations for the supervised warm-up, rough on purpose."""


class PicturesConfig(Section):
    """Pictures with small dots, and questions about the colors of the dots."""

    out_dir: UserPath
    """Folder of the files."""
    seed: Seed = 0
    """Seed of the pictures."""
    num_train: int = Field(default=1024, ge=1)
    """Training pictures."""
    num_val: int = Field(default=256, ge=1)
    """Validation pictures."""
    num_demos: int = Field(default=6400, ge=0)
    """Demonstrations for the supervised warm-up, rough on purpose."""


class Gsm8kConfig(Section):
    """The real GSM8K, from the hub or from local files."""

    out_dir: UserPath
    """Folder of the files."""
    source_dir: UserPath | None = None
    """Folder with `train.jsonl` and `test.jsonl`; null: the hub."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only so many problems of each split; null: all."""


class Geometry3kConfig(Section):
    """The real Geometry3K, problems with a picture, from the hub or from local files."""

    out_dir: UserPath
    """Folder of the files."""
    source_dir: UserPath | None = None
    """Folder with `train*.parquet` and `test*.parquet`, as the hub has them; null: the hub."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only so many problems of each split; null: all."""


Stopwords = Literal[
    "none", "en", "da", "de", "es", "fr", "it", "ko", "nl", "no", "pt", "ru", "sv", "tr", "zh"
]


class SearchIndexConfig(Section):
    """A BM25 index of a corpus, for `SearchTool` with `retriever: bm25`."""

    out_dir: UserPath
    corpus: UserPath
    """JSON lines of `{"id", "contents"}`, where the first line of the contents is a title, or of
    `{"id", "title", "text"}`; `id` and `title` may be missing."""
    stopwords: Stopwords = "en"
    """The language of the most common words, which are neither indexed nor searched."""
    k1: float = Field(default=1.5, ge=0)
    """Weight of further occurrences of a word."""
    b: float = Field(default=0.75, ge=0, le=1)
    """How much the length of a document lowers its score."""


class TinyVisionConfig(Section):
    """The vision tower of a small Qwen2-VL-architecture model."""

    image_size: int = Field(default=24, ge=4)
    """Pixels of each side to which a square picture is scaled; a multiple of two patches."""
    patch_size: int = Field(default=4, ge=1)
    """Pixels of each side of a patch. Four patches become one token."""
    hidden_size: int = 64
    """Width of the tower."""
    num_layers: int = 2
    """Blocks of the tower."""
    num_heads: int = 4
    """Attention heads of the tower."""


class TinyPolicyConfig(Section):
    """A small Qwen2-architecture model of random weights with a tokenizer of its own."""

    out_dir: UserPath
    """Folder of the model."""
    corpus: UserPath
    """Conversations (JSONL or parquet with `messages`) that the tokenizer is trained on."""
    vocab_size: int = Field(default=600, ge=300)
    """Tokens of the vocabulary."""
    hidden_size: int = 64
    """Width of the model."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 2
    """Heads of keys and values."""
    intermediate_size: int = 192
    """Width of the MLP."""
    max_position_embeddings: int = 2048
    """Most tokens of a sequence."""
    vision: TinyVisionConfig | None = None
    """Make a Qwen2-VL-architecture model that sees images; null: it reads text only."""
    seed: Seed = 0
    """Seed of the weights."""


class SftConfig(Section):
    """A short supervised training on conversations, with the masks of the rollout."""

    model_path: FolderOrHubName
    """The policy to train."""
    train_file: UserPath
    """Rows with `messages`, and with `tools` if their tools differ from the run's."""
    out_dir: UserPath
    """Folder of the trained policy."""
    steps: int = Field(default=1000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations of one optimizer step."""
    max_length: int = Field(default=1024, ge=2)
    """Tokens; longer conversations are dropped and counted."""
    observed_loss_weight: float = Field(default=0.0, ge=0)
    """Loss weight of user and tool tokens; the assistant's have 1, the system prompt's 0."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    optim: OptimConfig = OptimConfig(lr=1e-5, lr_scheduler="cosine")
    tool_config_path: UserPath | None = None
    """YAML of the tools of rows without `tools`; if `function_tool_path` is null too, the run's
    tools."""
    function_tool_path: str | None = None
    """Python file or module with `@function_tool` functions, for rows without `tools`."""
    num_held_out: int = Field(default=32, ge=0)
    """Conversations that are not trained on, at most a tenth of all; their loss is reported."""
    seed: Seed = 0
    """Seed of the order of the conversations."""


class PrepareConfig(Section):
    """What `agentrl train` makes first if it is missing, in this order."""

    arithmetic: ArithmeticConfig | None = None
    pictures: PicturesConfig | None = None
    gsm8k: Gsm8kConfig | None = None
    geometry3k: Geometry3kConfig | None = None
    tiny_policy: TinyPolicyConfig | None = None
    sft: SftConfig | None = None
