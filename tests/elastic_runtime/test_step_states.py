"""The table of a step's states: the page shows it, and no state is a dead end."""

from __future__ import annotations

from pathlib import Path

from elastic_runtime.loop.step_states import TRANSITIONS, StepState, StepTrigger

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "elastic.md"
OUTSIDE = {StepState.BETWEEN_STEPS, StepState.BETWEEN_MICRO_BATCHES, StepState.COUNTED}


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    shown = page.split("<!-- table: step -->\n")[1].split("\n\n")[0].splitlines()[2:]
    in_words = {StepTrigger.ABANDONED, StepTrigger.REVERTED}
    assert shown == [
        f"| {state} | {trigger} | {after} |"
        for state, row in TRANSITIONS.items()
        for trigger, after in row.items()
        if trigger not in in_words
    ]
    assert all(f"`{trigger}`" in page for trigger in in_words)
    described = page.split("| state | meaning |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in described] == list(StepState)


def test_the_loop_may_be_left_and_a_step_repeated_in_every_state_of_an_iteration() -> None:
    assert TRANSITIONS.keys() == set(StepState)
    for state, row in TRANSITIONS.items():
        assert row[StepTrigger.ABANDONED] is StepState.BETWEEN_STEPS
        assert row.get(StepTrigger.REVERTED) is (None if state in OUTSIDE else StepState.REPEATED)


def test_every_state_is_reached() -> None:
    reached, new = set[StepState](), {StepState.BETWEEN_STEPS}
    while new:
        reached |= new
        new = {after for state in new for after in TRANSITIONS[state].values()} - reached
    assert reached == set(StepState)
