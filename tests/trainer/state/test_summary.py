"""What a run's last lines say."""

from pathlib import Path

from agentrl.trainer.state.summary import Summary


def lines_of(summary: Summary) -> list[str]:
    return summary.describe(Path("runs/x")).splitlines()


def test_preparation_is_not_counted_among_the_seconds_of_the_steps():
    summary = Summary(seed=0, steps=12, seconds_total=29.0)
    assert lines_of(summary) == ["12 steps in 29 s; all of it in runs/x"]
    summary.count_preparation(20.0)
    assert lines_of(summary) == ["12 steps in 29 s, after 20 s of preparation; all of it in runs/x"]


def test_a_single_step_is_a_step():
    summary = Summary(seed=0, steps=1, seconds_total=5.0, steps_without_signal=1)
    first, second = lines_of(summary)
    assert first == "1 step in 5 s; all of it in runs/x"
    assert second.startswith("1 of 1 step had no learning signal")


def test_steps_without_a_learning_signal_are_counted_at_the_end():
    summary = Summary(seed=0, steps=4)
    for share in (1.0, 0.75, 1.0):
        summary.note_signal({"algorithm/zero_signal_groups_frac": share})
    summary.note_signal({})
    assert lines_of(summary)[1] == "2 of 4 steps had no learning signal: every advantage was 0"


def test_run_that_is_stopped_goes_on_from_what_was_saved_last():
    now = Summary(seed=0, seconds_total=9.0, skipped_updates=1, checkpoint="global_step_3")
    back = now.restored(Summary(seed=0, seconds_total=5.0, checkpoint="global_step_2"))
    assert back == Summary(seed=0, seconds_total=9.0, checkpoint="global_step_3")
    assert back.at_stop(3) == "step 3 was completed last; the run resumes from global_step_3"
    assert back.at_stop(0) == "no step was completed"


def test_best_of_the_validated_steps_that_are_saved_is_known():
    summary = Summary(seed=0, exported="trained")
    validated = (1, 0.9, False), (2, 0.5, True), (3, 0.75, True), (4, 0.1, True)
    for step, success, is_saved in validated:
        summary.note_validation(step, {"a": success}, 8)
        if is_saved:
            summary.note_checkpoint(step)
    summary.note_checkpoint(5)  # was not validated
    assert (summary.best_saved_step, summary.best_saved_success) == (3, 0.75)
    summary.steps = 5
    assert lines_of(summary)[-1] == (
        "validation fell from 0.900 (step 1) to 0.100; best saved step: global_step_3; "
        "trained/ is the last step, 5"
    )


def test_saved_step_that_is_worse_than_the_start_is_not_called_the_best():
    summary = Summary(seed=0, steps=8, exported="trained")
    summary.note_validation(0, {"a": 0.328}, 64)
    summary.note_validation(8, {"a": 0.031}, 64)
    summary.note_checkpoint(8)
    assert lines_of(summary)[-1] == (
        "validation fell from 0.328 (step 0) to 0.031; trained/ is the last step, 8"
    )


def test_small_change_from_the_best_validation_is_no_fall():
    summary = Summary(seed=0, steps=8, exported="trained")
    summary.note_validation(4, {"a": 0.75}, 64)
    summary.note_validation(8, {"a": 0.72}, 64)
    assert lines_of(summary)[-1] == (
        "the best validation was 0.750 at step 4; trained/ is the last step, 8"
    )


def test_success_without_an_earlier_value_is_reported_alone():
    summary = Summary(seed=0)
    summary.note_validation(4, {"arithmetic": 0.5, "unseen": 0.25}, 8)
    assert lines_of(summary)[1:] == [
        "success on 8 held-out problems: 0.500", "success on unseen: 0.250",
    ]  # fmt: skip
