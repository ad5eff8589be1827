"""Transcripts of trajectories with several sequences."""

from agentrl.trainer.rollouts.transcript import plain_transcript, read_transcript
from tests.fakes.requests import observed, said
from tests.test_collate_branches import build_trajectory


def test_each_sequence_is_shown_with_its_own_tokens_and_rewards() -> None:
    request = build_trajectory(
        (said(2), observed(1)), (said(3),), request_id="r", uid="g", reward=1.0
    )
    shown = read_transcript(request, lambda ids: "".join(f"<{i}>" for i in ids))
    names = [section.name for section in shown.sections]
    assert [name.split(" ")[0] for name in names] == ["r#0", "r#0", "r#0", "r", "r"]
    assert "(compaction: continued)" in names[0]
    assert "(the last sequence)" in names[-1]
    rewards = [[token.reward for token in section.tokens] for section in shown.sections]
    assert rewards == [[None] * 2, [None] * 2, [None], [None] * 2, [None, None, 1.0]]
    text = plain_transcript(shown)
    assert "2 sequences" in text
    assert "6 response tokens" in text
    assert "reward: 1, on 1 token of 2 sequences" in text
