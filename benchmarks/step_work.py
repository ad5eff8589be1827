"""The work of `step.py`, which both sides of the comparison do. Imports neither library.

16 samples of two prompts, 4 turns each. Every turn is 100 tokens, chosen in advance: random digits
(a digit is a token) and a call of the tool, whose answer is digits too. So the text of a sample is
the same on both sides, whatever their policies would have sampled.
"""

import random
from typing import Any

NUM_PROMPTS, NUM_SAMPLES, NUM_TURNS = 2, 8, 4
NUM_ROWS = NUM_PROMPTS * NUM_SAMPLES
PROMPT_TOKENS, TURN_TOKENS, RESPONSE_TOKENS = 740, 100, 916
MAX_PROMPT, MAX_RESPONSE = 768, 1024
NUM_STEPS = 2
"""Steps of a process; the first is not counted."""


def digits(seed: object, count: int) -> str:
    return "".join(random.Random(str(seed)).choices("0123456789", k=count))


def count_tokens(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> int:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def make_prompts(tokenizer: Any, tools: list[Any]) -> list[list[dict[str, str]]]:
    """Return conversations of `PROMPT_TOKENS` tokens each, tools included."""
    empty = [{"role": "user", "content": ""}]
    used = count_tokens(tokenizer, empty, tools=tools, add_generation_prompt=True)
    return [
        [{"role": "user", "content": digits(("prompt", i), PROMPT_TOKENS - used)}]
        for i in range(NUM_PROMPTS)
    ]


def turn_ids(tokenizer: Any, row: int, turn: int) -> list[int]:
    """Return the tokens that a row's turn consists of."""
    tail = ""
    if turn < NUM_TURNS - 1:
        call = f'{{"name": "lookup", "arguments": {{"key": "{row} {turn}"}}}}'
        tail = f"\n<tool_call>\n{call}\n</tool_call>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tail_ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    body = digits((row, turn), TURN_TOKENS - 1 - len(tail_ids))
    ids = [*tokenizer(body, add_special_tokens=False)["input_ids"], *tail_ids, end]
    assert len(ids) == TURN_TOKENS, len(ids)
    return ids


def make_script(tokenizer: Any) -> list[list[list[int]]]:
    """Return the tokens of each row's turns."""
    turns = range(NUM_TURNS)
    return [[turn_ids(tokenizer, row, turn) for turn in turns] for row in range(NUM_ROWS)]


def answer_digits(tokenizer: Any) -> int:
    """Return how many digits a tool's answer has so that a response has `RESPONSE_TOKENS`."""
    call = [{"type": "function", "function": {"name": "lookup", "arguments": {"key": "0"}}}]
    before = [{"role": "user", "content": "0"}, {"role": "assistant", "tool_calls": call}]
    after = [*before, {"role": "tool", "name": "lookup", "content": ""}]
    # The newline after a turn's end is observed, too.
    used = 1 + count_tokens(tokenizer, after, add_generation_prompt=True)
    used -= count_tokens(tokenizer, before)
    observed = RESPONSE_TOKENS - NUM_TURNS * TURN_TOKENS
    return observed // (NUM_TURNS - 1) - used
