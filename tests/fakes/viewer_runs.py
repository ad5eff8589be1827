"""Run folders for the viewer, written line by line: as large as wanted, in seconds."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl.config.schema.reward import RewardConfig
from agentrl.media.records import Video
from agentrl.messages import FunctionCall, Message, ToolCall
from agentrl.rollout.records import CallRecord
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollouts.files import rollout_path, to_line
from agentrl.trainer.rollouts.pictures import PictureCollector, write_pictures
from agentrl.trainer.rollouts.token_files import TOKENS_VERSION, token_path
from tests.fakes.finished_requests import append_answer, finish_request, start_request

GROUP = 8
ANSWERED = StopReason.ANSWERED
QUESTIONS = (
    "A train has 12 cars with 48 seats each. How many seats are there?",
    "Nina has 83 stamps, buys 38 more and loses 78. How many are left?",
    "Bread costs 3 coins, cheese 7. What do 4 of each cost?",
)


def write_view_run(
    folder: Path, *, num_steps: int = 3, per_step: int = 16, seed: int = 0, is_live: bool = False
) -> Path:
    """Write a run: metrics, configuration, tokenizer, rollouts of each step and their tokens."""
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    write_config(folder, seed=seed)
    draw = random.Random(seed)
    for step in range(1, num_steps + 1):
        append_metrics(folder, step, draw)
        write_step(folder, step, per_step, draw)
    if not is_live:
        (folder / "summary.json").write_text("{}")
    return folder


def grow(folder: Path, steps: range, per_step: int) -> None:
    """Append steps to a run, as a run that trains does: the rollouts, then the line of metrics."""
    draw = random.Random(steps.start)
    for step in steps:
        write_step(folder, step, per_step, draw)
        append_metrics(folder, step, draw)


def write_config(folder: Path, *, seed: int) -> None:
    model, start = folder / "model", folder / "starts" / "0001"
    model.mkdir()
    start.mkdir(parents=True)
    vocabulary = {chr(code): code for code in range(256)}
    Tokenizer(WordLevel(vocabulary, unk_token="\x00")).save(str(model / "tokenizer.json"))
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "actor": {"lr": 1e-6 * (1 + seed), "clip_ratio": 0.2},
        "trainer": {
            "default_local_dir": str(folder),
            "rollout_data_dir": str(folder / "rollouts"),
            "seed": seed,
        },
    }
    (start / "resolved.yaml").write_text(yaml.safe_dump(config))


def append_metrics(folder: Path, step: int, draw: random.Random) -> None:
    """Append the line of a step, as a run that trains does."""
    line = {
        "step": step,
        "rollout/reward/mean": 1 - 0.9 * 0.99**step + draw.gauss(0, 0.03),
        "actor/grad_norm": 10 ** draw.gauss(-1, 0.3),
        "actor/entropy": 2 * 0.995**step + draw.gauss(0, 0.02),
        "response_length/mean": 80 + draw.gauss(0, 5),
        "timing_s/step": 10 + draw.random(),
        "perf/total_num_tokens": 5000.0,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def make_line(messages: list[Message], answer: str, *, reason: StopReason, **fields: Any) -> str:
    """Write a conversation as a line: a call of the calculator, its result, and an answer."""
    prompt = messages[0].text[:1000].encode(errors="replace").decode()
    request = start_request(prompt, **fields)
    call = CallRecord(
        name="calculator",
        arguments={"expression": "12 * 48"},
        seconds=0.5,
        queue_seconds=0.1,
        num_tokens=4,
        span=(0, 40),
    )
    append_answer(request, 'Let me compute. {"expression": "12 * 48"}', calls=[call])
    request.append_observed(list(b"=576"), role="tool", seconds=0.6)
    append_answer(request, answer)
    request.messages = messages
    request.metrics["seconds"] = 1.1
    finish_request(request, reason)
    return to_line(request, 1, PictureCollector(), reward=RewardConfig()).text


def conversation(question: str, result: str, answer: str) -> list[Message]:
    function = FunctionCall(name="calculator", arguments={"expression": "12 * 48"})
    call = ToolCall(id="call_0", function=function)
    return [
        Message(role="user", content=question),
        Message(role="assistant", content="Let me compute.", tool_calls=[call]),
        Message(role="tool", content=result, tool_call_id="call_0", name="calculator"),
        Message(role="assistant", content=answer),
    ]


def write_step(folder: Path, step: int, num: int, draw: random.Random) -> None:
    """Write `num` trajectories of a step, in groups of 8, and their tokens."""
    templates = [
        json.loads(make_line(conversation(text, "576", "It is 576."), "It is 576.", reason=reason))
        for text in QUESTIONS
        for reason in (StopReason.ANSWERED, StopReason.FAILED)
    ]
    lines, rows = list[str](), list[dict[str, Any]]()
    for number in range(num):
        group = number // GROUP
        is_failed = draw.random() < 0.03
        line = copy.deepcopy(templates[group % len(QUESTIONS) * 2 + is_failed])
        vary_line(line, step, number, draw)
        set_times(line["request"])
        lines.append(json.dumps(line) + "\n")
        rows.append(row_of_tokens(line, draw))
    path = rollout_path(folder / "rollouts", step)
    metadata = {b"agentrl_version": str(TOKENS_VERSION)}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), token_path(path))
    draft = path.with_suffix(".draft")
    draft.write_text("".join(lines))
    draft.rename(path)


def write_picture_step(folder: Path, step: int, num: int = 2) -> list[str]:
    """Write trajectories with a picture in the prompt and one of the tool; returns all names."""
    collector, lines, names = PictureCollector(), list[str](), list[str]()
    for number in range(num):
        pictures = [
            collector.plain(Image.new("RGB", size, (40 * number, 90, 160)))
            for size in ((640, 480), (24, 24 + number))
        ]
        line = json.loads(
            make_line(conversation("Which color?", "a part", "blue"), "blue", reason=ANSWERED)
        )
        request = line["request"]
        line["step"], request["request_id"] = step, f"train-{step}-{number}"
        num_prompt, reply = len(request["prompt_ids"]), request["turns"][1]
        for message in (request["messages"][0], request["messages"][2]):
            text = {"type": "text", "text": message["content"]}
            message["content"] = [{"type": "image"}, text]
        request["multi_modal_data"] = {"image": pictures}
        request["media_runs"] = [
            {
                "start": 0,
                "end": 6,
                "kind": "image",
                "index": 0,
                "offset": 0,
                "source": "a/plan.png",
            },
            {
                "start": num_prompt + reply["start"],
                "end": num_prompt + reply["end"],
                "kind": "image",
                "index": 1,
                "offset": 0,
                "source": "",
            },
        ]
        names += [picture[key] for picture in pictures for key in ("path", "thumbnail")]
        lines.append(json.dumps(line) + "\n")
    rollout_path(folder / "rollouts", step).write_text("".join(lines))
    write_pictures(folder / "rollouts", collector.take())
    return names


def write_video_step(folder: Path, step: int) -> None:
    """Write a trajectory with a video in the prompt: a red frame, then two blue ones."""
    colors = np.array([(200, 20, 20), (20, 20, 200), (20, 20, 200)], np.uint8)
    frames = np.broadcast_to(colors[:, None, None], (3, 48, 64, 3))
    collector = PictureCollector()
    line = json.loads(make_line(conversation("Which?", "a part", "red"), "red", reason=ANSWERED))
    request, line["step"] = line["request"], step
    text = {"type": "text", "text": "Which?"}
    request["messages"][0]["content"] = [{"type": "video"}, text]
    request["multi_modal_data"] = {"video": [collector.plain(Video(frames, 2.0))]}
    run = {"start": 0, "end": 5, "kind": "video", "index": 0, "offset": 0, "source": ""}
    request["media_runs"] = [run]
    rollout_path(folder / "rollouts", step).write_text(json.dumps(line) + "\n")
    write_pictures(folder / "rollouts", collector.take())


def vary_line(line: dict[str, Any], step: int, number: int, draw: random.Random) -> None:
    request, group = line["request"], number // GROUP
    reward = round(min(1.0, max(0.0, draw.gauss(0.5, 0.3))), 3)
    line.update(step=step, combined_reward=reward)
    request.update(
        request_id=f"train-{step}-{number}",
        uid=f"train-{step}-{group}",
        batch_data_id=group,
        rollout_offset=number % GROUP,
        reward=reward,
        data_source="gsm8k" if group % 2 else "arithmetic",
        ground_truth="576",
    )
    request["metrics"]["seconds"] = round(1.1 + draw.lognormvariate(0.0, 0.8), 3)
    call = request["turns"][0]["calls"][0]
    if draw.random() < 0.2:
        call.update(name="search", arguments={"query": "trains"}, seconds=draw.uniform(1, 4))
        call.update({"outcome": "timeout", "seconds": 10.0} if draw.random() < 0.5 else {})
    more = " That is what the calculator says." * min(6, int(draw.expovariate(0.7)))
    replace_answer(line, f"It is {number}.{more}", version=step - 1)


def set_times(request: dict[str, Any], started: float = 1.7e9) -> None:
    """Set when the request, its turns, its call and its score began, and how long they took."""
    metrics, (asking, reply, answer) = request["metrics"], request["turns"]
    call = asking["calls"][0]
    asking["seconds_started"] = started + 0.0625
    call["seconds_started"] = reply["seconds_started"] = started + 0.3125
    reply["seconds"] = call["queue_seconds"] + call["seconds"]
    answer["seconds_started"] = started + 0.375 + reply["seconds"]
    answer["seconds"] = metrics["seconds"] - 1
    metrics["seconds"] = 0.4375 + reply["seconds"] + answer["seconds"]
    metrics |= {
        "seconds_started": started,
        "seconds_reward_started": started + metrics["seconds"] + 0.125,
        "seconds_reward": 0.125,
    }


def replace_answer(line: dict[str, Any], answer: str, *, version: int) -> None:
    """Replace the last turn: its message, its tokens, and the summary of the line."""
    request, summary, num = line["request"], line["summary"], len(answer)
    request["messages"][-1]["content"] = answer
    turn = request["turns"][-1]
    start = turn["start"]
    turn.update(end=start + num, weight_versions=[[version, 0, num]])
    values = {"response_ids": answer.encode(), "loss_mask": [1] * num}
    for key, new in {**values, "rollout_log_probs": [-0.1 * (i % 9) for i in range(num)]}.items():
        request[key] = [*request[key][:start], *new]
    mask = request["loss_mask"] if request["state"] == "completed" else [0] * (start + num)
    summary.update(
        num_response_tokens=len(mask),
        num_trained_tokens=sum(mask),
        mask_ones_ratio=sum(mask) / len(mask),
        reward_index=len(mask) - 1 if sum(mask) else None,
    )


def row_of_tokens(line: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    request = line["request"]
    num = len(request["response_ids"])
    advantage = line["combined_reward"] - 0.5
    return {
        "request_id": request["request_id"],
        "response_mask": [float(one) for one in request["loss_mask"]],
        "old_log_probs": [one - 0.02 * draw.random() for one in request["rollout_log_probs"]],
        "entropies": [draw.random() for _ in range(num)],
        "token_level_scores": [0.0] * (num - 1) + [line["combined_reward"]],
        "advantages": [advantage] * num,
    }
