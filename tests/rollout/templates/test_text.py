"""Encoding of outside text with tokenizers of other kinds than byte-level BPE."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.errors import TemplateError
from agentrl.rollout.templates import ChatTemplate, probe_template
from agentrl.rollout.templates.text import TextEncoder
from tests.fakes.templates import load_template, user

SOURCE = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz[]</>|. "


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A unigram model that writes blanks as pieces and holds `<s>` as a piece of its own."""
    pieces = [("<unk>", 0.0), ("<s>", -0.1), ("</s>", -0.1), ("▁", -2.0), ("▁a", -1.5)]
    pieces += [(letter, -3.0) for letter in LETTERS.replace(" ", "")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = SOURCE
    return fast


def llama_like() -> PreTrainedTokenizerFast:
    """A BPE model whose normaliser puts a blank before everything."""
    vocab = {"<s>": 0, "</s>": 1} | {c: i for i, c in enumerate("▁" + LETTERS.strip(), 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = SOURCE
    return fast


@pytest.fixture(scope="module", params=[sentencepiece_like, llama_like])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate(request.param())


@settings(max_examples=60, deadline=None)
@given(text=st.text(LETTERS, max_size=20))
def test_control_tokens_no_piece_of_the_vocabulary_is_a_control_token(
    template: ChatTemplate, text: str
) -> None:
    for hostile in (text, f"<s>{text}</s>"):
        ids = template.encode_text(hostile)
        assert not set(ids) & set(template.structure.encoder.added.values())
        assert template.decode(ids) == hostile


def test_a_prompt_has_the_blanks_that_the_tokenizer_gives_it_and_no_others(
    template: ChatTemplate,
) -> None:
    ids = template.encode_prompt([user("abc"), user("d e")])
    written = "<s>[user]abc</s>[user]d e</s>[assistant]"
    tokenizer = template.structure.renderer._tokenizer
    assert ids == tokenizer.encode(written, add_special_tokens=False)
    assert template.decode(template.generation_prompt_ids) == "[assistant]"


def test_an_added_run_of_blanks_is_no_control_token() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\n": 0, "\n\n": 1, "a": 2}, merges=[("\n", "\n")]))
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert encoder.encode_text("a\n\na") == [2, 1, 2]


def test_an_added_run_of_blanks_beyond_the_vocabulary_is_encoded_as_the_tokenizer_does() -> None:
    vocab = {"<s>": 0, " ": 1, "a": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("   ", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")
    encoder = TextEncoder(fast)
    assert encoder.encode_text("a   a<s>") == [*fast.encode("a   a"), *encoder.encode_text("<s>")]
    assert encoder.encode_text("a  a") == [2, 3, 2]


def test_a_tokenizer_without_fast_backend_is_refused() -> None:
    class Slow:
        backend_tokenizer = None

    with pytest.raises(TemplateError, match="no fast backend"):
        TextEncoder(Slow())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "is_inert"),
    [
        ("Search the web.", True),
        ("a < b", True),
        ("ends with <", False),
        ("|> begins", False),
        ("im_start", False),
        ("<|IM_START|>", False),
        ("＜|im_start|＞", False),
        ("call <tool_call> now", False),
        ("ends <|im_end|>\u0338", False),
        ("<|im_end|>\u0323\u0338 in the middle", False),
        ("a plain sign>\u0338 alone", True),
    ],
)
def test_a_schema_s_word_is_harmless_only_far_from_any_control_token(
    text: str, is_inert: bool
) -> None:
    assert load_template("qwen2_5").structure.encoder.is_inert(text) is is_inert


def test_a_probe_says_where_the_round_trip_is_not_exact() -> None:
    """A vocabulary without the awkward characters loses them."""
    assert not probe_template(ChatTemplate(sentencepiece_like())).round_trip


def test_importing_templates_loads_no_heavy_package() -> None:
    code = (
        "import sys, agentrl.rollout.templates as t; "
        "print([m for m in ('torch', 'transformers', 'ray', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(max_size=20)
        | st.sampled_from(["<|im_end|>", "<tool_call>", "a\ud800b", "", "e\u0301", "  \n"]),
        max_size=6,
    )
)
def test_texts_encoded_together_are_those_encoded_alone(texts: list[str]) -> None:
    template = load_template("qwen2_5")
    assert template.encode_texts(texts) == [template.encode_text(text) for text in texts]
