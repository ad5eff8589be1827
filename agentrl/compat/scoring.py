"""Scorers of verl 0.6.1, under verl's signatures.

The functions call agentrl's own, so agentrl's rules apply: thoughts are not read, numbers and
mathematics are compared by value. `docs/from_verl.md` lists what differs.
"""

import asyncio
import inspect
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from agentrl.answers import Method, extract_gsm8k_answer, is_same_answer, last_boxed, read_text
from agentrl.errors import RewardError, SandboxError
from agentrl.rewards import gsm8k, math_answer, math_dapo, qa
from agentrl.rewards.sources import BUNDLED, find_bundled
from agentrl.rewards.sources import default_compute_score as own_default_compute_score
from agentrl.sandbox import Execution, ExecutionEnd
from agentrl.sandbox.fusion import FusionClient

FINISHED = (ExecutionEnd.OK, ExecutionEnd.ERROR)
"""Ends of programs that SandboxFusion reports as finished."""

_BOX = "\\boxed{"
_GEO3K_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Score by the data source: a number, or a dict with it under `score`.

    Raises:
        RewardError: for a source without a scorer, and for one whose scorer runs code: that needs
            the sandbox of a run, so leave it to `reward.manager`.
    """
    bundled = BUNDLED[find_bundled(data_source)]
    if bundled.needs_sandbox or inspect.iscoroutinefunction(bundled.load()):
        raise RewardError(
            f"the scorer of {data_source!r} runs code in the sandbox of a run",
            expected="no custom_reward_function for these rows: the run scores them by itself",
        )
    return own_default_compute_score(data_source, solution_str, ground_truth, extra_info)


def format_reward(predict_str: str) -> float:
    """Score the form of a solution of Geometry3K: a thought, then a box."""
    return float(_GEO3K_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Score the answer of a solution of Geometry3K: the last box, or the whole text."""
    truth = read_text(ground_truth, expected="an answer")
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and is_same_answer(answer, truth))


def score_geo3k(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Score a solution of Geometry3K by its answer and its form."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)


def extract_number(solution_str: str, method: Method = "strict") -> str | None:
    """Find the answer in a solution of GSM8K; None if there is none."""
    return extract_gsm8k_answer(solution_str, method)


def score_gsm8k(
    solution_str: str,
    ground_truth: Any,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score a solution of GSM8K (see `agentrl.rewards.gsm8k.compute_score`)."""
    keys: dict[str, Any] = {"method": method, "format_score": format_score, "score": score}
    return gsm8k.compute_score("openai/gsm8k", solution_str, ground_truth, **keys)["score"]


def score_math(solution_str: str, ground_truth: Any) -> float:
    r"""Score an answer in `\boxed{}` (see `agentrl.rewards.math_answer.compute_score`)."""
    return math_answer.compute_score("math", solution_str, ground_truth)["score"]


def score_math_verify(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """Score a solution, with or without a box."""
    found = math_answer.compute_score("math", model_output, ground_truth, method="flexible")
    return found["score"]


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
) -> list[float]:
    """Score many solutions; for the manager `batch`."""
    return [score_math(*one) for one in zip(solution_strs, ground_truths, strict=True)]


def score_math_dapo(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Score 1 for a right answer, -1 for any other (`agentrl.rewards.math_dapo`)."""
    found = math_dapo.compute_score(
        "math_dapo", solution_str, ground_truth, strict_box_verify=strict_box_verify
    )
    return {"score": found["score"], "acc": bool(found["acc"]), "pred": found["pred"] or None}


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers mean the same."""
    return str1 is not None and str2 is not None and is_same_answer(str1, str2)


def last_boxed_only_string(string: str) -> str | None:
    r"""Find the last closed `\boxed{...}`, whole; None if there is none."""
    inside = last_boxed(string)
    return None if inside is None else f"{_BOX}{inside}}}"


def remove_boxed(s: str) -> str:
    r"""Remove `\boxed{` and `}`."""
    return s.removeprefix(_BOX).removesuffix("}")


def score_exact_match(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score an answer in `<answer>` by exact match (see `agentrl.rewards.qa.compute_score`)."""
    keys: dict[str, Any] = {"format_score": format_score, "score": score}
    return qa.compute_score("searchR1", solution_str, ground_truth, **keys)["score"]


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return whether an answer equals a golden answer, normalized: 1 or 0."""
    golden = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return int(any(qa.is_same(prediction, one) for one in golden))


def score_contained(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score an answer in `<answer>` by whether a golden answer is in it."""
    keys: dict[str, Any] = {"metric": "contains", "format_score": format_score, "score": score}
    return qa.compute_score("searchR1", solution_str, ground_truth, **keys)["score"]


def process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: int,
    memory_limit_mb: int,
    language: str,
    concurrent_semaphore: Any = None,
    fn_name: str | None = None,
) -> tuple[bool | int, dict[str, Any]]:
    """Run a program on SandboxFusion, from a thread without an event loop.

    Returns:
        True (it printed the expected output, or none was given), False, -1 (the service failed) or
        -2 (it ran out of time); and how it ran.
    """

    async def run() -> Execution:
        client = FusionClient(sandbox_fusion_url, memory_limit_mb=memory_limit_mb)
        try:
            return await client.run(
                generation, timeout_s=timeout, language=language, stdin=str(stdin_data or "")
            )
        finally:
            await client.close()

    with concurrent_semaphore or nullcontext():
        try:
            execution = asyncio.run(run())
        except SandboxError as error:
            return -1, {"status": "api_error", "run_status": None, "api_request_error": str(error)}
    has_ended = execution.end in FINISHED
    expected = execution.stdout if expected_output is None else str(expected_output)
    is_right = execution.end is ExecutionEnd.OK and execution.stdout.strip() == expected.strip()
    metadata = {
        "case_index": case_index,
        "run_status": "Finished" if has_ended else "TimeLimitExceeded",
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "exit_code": execution.exit_code,
        "status": "success" if is_right else "wrong_answer" if has_ended else "timeout",
        "api_request_error": None,
    }
    return is_right if has_ended else -2, metadata
