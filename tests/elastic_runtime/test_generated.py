"""Scripts composed of parts are right through every history, or refused by name, or a rehearsal finds them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests import forked
from tests.elastic_runtime.zoo import restrictions
from tests.elastic_runtime.zoo.generated.drawing import Case, drawn
from tests.elastic_runtime.zoo.generated.lives import History
from tests.elastic_runtime.zoo.generated.recipes import PREFIX, Recipe
from tests.elastic_runtime.zoo.generated.verdicts import HISTORIES, judge, judge_all

if TYPE_CHECKING:
    from pathlib import Path

SLOW_CASES, PARTS = 16, 4
SEED = int(os.environ.get("ELASTIC_RECIPES_SEED", "0"))
CASES = int(os.environ.get("ELASTIC_RECIPES", str(SLOW_CASES)))


def of(text: str, reduction: str, history: str) -> str:
    """The verdict on one recipe, and what it says."""
    verdict = judge(Case(f"{PREFIX}{Recipe.parse(text)}", reduction, (history,)))
    return f"{verdict.result}: {verdict.why}"


RIGHT = [
    ("stepped_at_the_epochs_begin+buffer_before", "fast", "stop:5 stop_before:2 join:10"),
    ("group_added_before+evaluated_before_the_epoch", "exact", "stop:6 join:9"),
    ("weights_shrunk_before+weights_shrunk_after", "exact", "join:2 stop:6 stop_after:2"),
    ("moments_cleared_before+adamw", "fast", "stop:2 join:6 stop:9"),
    ("transposed_moments", "exact", "stop:5 join:9"),
    ("noise_in_the_optimizer", "fast", "join:3 stop:6 join:9 leave:13"),
    ("transposed_moments+group_added_before", "fast", "with:2 join:4 stop_after:2"),
    ("shuffled_again_in_set_epoch", "fast", "stop:9 join:13"),
    ("expert_of_every_third_step+cleared_to_zeros", "fast", "stop:5 join:9"),
    ("expert_of_the_first_steps+adamw+cleared_to_zeros_first", "exact", "stop:6"),
    ("rates_summed_before", "fast", "with:2 join:6 stop:13"),
    ("layer_frozen_before+cleared_to_zeros", "fast", "with:2 kill:9:1 stop:13 join:15"),
    ("expert_of_every_third_step+cleared_to_zeros+every_fourth_step_skipped", "fast", "with:2 leave:7 stop:12"),
    ("own_numpy_generator+extra_state", "exact", "with:2 kill:5:0 stop:9"),
    ("weights_that_are_tracked", "fast", "stop:6 join:9 stop_after:3"),
    ("samples_scaled_by_the_epoch", "fast", "stop_after:1 stop:9 join:13"),
    ("mean_loss_printed_after+tracked_count_of_steps", "fast", "evict_after:1 with:2 kill:10:0"),
    ("last_losses_kept_after+batch_norm+by_global_steps", "exact", "crash_after:1 evict_after:2 evict_after:2"),
    ("mean_loss_over_all_workers_after+stream+evaluated_in_the_loop", "fast", "evict_after:4"),
    ("weights_shrunk_after+noise_of_the_samples", "fast", "evict_after:1 evict_left:2"),
    ("rate_lowered_at_the_epochs_end+tracked_count_of_epochs_after+adamw", "fast", "evict_left:1 with:2"),
    ("extra_state+buffer_after+tracked_sum_that_is_large", "exact", "evict_left:1 evict_after:2"),
    ("rate_of_a_kept_group_lowered", "fast", "stop:5 join:9"),
    ("wrapper_that_shares_groups_and_state+stepped_at_the_epochs_end", "fast", "stop:5 join:9"),
    ("wrapper_that_shares_groups+stepped_at_the_epochs_begin", "exact", "stop:6 join:9 kill:13:0"),
    ("rate_of_the_next_step+in_pieces", "fast", "with:3 kill:6:1"),
    ("warmup_around_each_step+in_pieces", "fast", "with:3 kill:6:1 stop:13"),
    ("shadow_that_keeps_a_graph", "fast", "stop:5 join:9"),
    ("generator_of_a_sampler_in_the_sampler", "fast", "with:2 kill:5:0 stop:13 join:14"),
    ("gradients_read_where_applied+cleared_first", "fast", "evict_after:1 stop_after:2"),
    ("lists_of_classes_shuffled_in_place", "exact", "stop:9 join:13"),
]


@pytest.mark.parametrize(("recipe", "reduction", "history"), RIGHT, ids=[recipe for recipe, *_ in RIGHT])
def test_a_script_trains_the_same_through_stops_joins_and_losses(recipe: str, reduction: str, history: str) -> None:
    verdict = of(recipe, reduction, history)
    assert verdict.startswith("passed"), verdict


def test_a_mask_that_is_made_before_prepare_prunes_through_stops_and_joins() -> None:
    verdict = judge(Case("weights_pruned_by_a_mask_made_before", "fast", ("stop:9 join:13", "join:5 kill:10:0")))
    assert verdict.result == "passed", verdict


@pytest.mark.parametrize("script", ["tables_with_sparse_gradients", "word_vectors_of_sparse_gradients_only"])
def test_sparse_gradients_are_summed_through_stops_joins_and_losses(script: str) -> None:
    verdict = judge(Case(script, "fast", ("join:5 kill:10:0", "with:2 kill:9:1", "stop:5 join:9")))
    assert verdict.result == "passed", verdict


REFUSED = [
    ("layer_replaced_before", "stop:5", "refused: alone: parameter '2.weight' .* created after prepare"),
    ("counter_in_the_optimizer", "stop:5", "refused: alone: CountingSgd changes its attribute 'count'"),
    ("set_from_first_batch", "stop:5", "refused: alone: .*an initialisation from the first batch"),
    ("slow_weights_in_the_optimizer", "stop:5", "refused: alone: SlowSgd changes its attribute 'slow'"),
    ("mean_with_a_graph_of_its_gradients", "stop:5", "refused: alone: job.backward got create_graph=True"),
    ("schedule_without_a_state", "stop:5", "refused: alone: Forgetful, a scheduler, lacks state_dict"),
    ("state_under_a_number", "stop:5", "refused: alone: NumberedSgd keeps state under the key 0"),
    ("wrapper_without_init", "stop:5", "refused: alone: Wrapper has not called __init__ of torch.optim"),
    ("embedding_max_norm", "stop:5", "refused: alone: table has max_norm"),
    ("embedding_scaled_by_frequency", "stop:5", "refused: alone: table has scale_grad_by_freq"),
    ("stream_with_a_buffer", "stop:5", "refused: alone: .*its state leaves something out"),
    ("weights_set_by_hand", "stop:5", "refused: alone: the script changed 'weights' of WeightedRandomSampler"),
    ("more_samples_in_each_epoch", "stop:5", "refused: alone: the loader had 24 samples .*, and 28 in epoch 1"),
    ("smaller_batches_at_first", "stop:5", "refused: alone: the script changed the loader's batch size from 12 to 6"),
    ("samples_scaled_after_each_epoch", "stop:5", "refused: alone: the script changed 'size' of its Scaled"),
    ("plateau_of_a_local_loss", "with:2", "refused: with:2: attribute 'best' of ReduceLROnPlateau of rank 1 differs"),
    ("momentum_by_a_counter_of_steps", "join:6", "refused: join:6: 'weight_decay' of group 0 of SGD of rank 1 differs"),
    (
        "momentum_by_a_counter_of_steps",
        "join:6 stop_before:4",
        "refused: join:6 stop_before:4: 'weight_decay' of group 0",
    ),
]


@pytest.mark.parametrize(
    ("recipe", "history", "words"), REFUSED, ids=[f"{recipe} {history}" for recipe, history, _ in REFUSED]
)
def test_what_cannot_be_right_is_refused_by_name_on_every_worker(recipe: str, history: str, words: str) -> None:
    assert re.match(words, of(recipe, "fast", history))


FOUND = [
    ("count_of_epochs", "stop:5", "depend on the number of workers"),
    ("noise_that_is_kept_in_a_cache", "stop:5", "give other samples"),
    ("class_weights", "with:2", "job.backward\\(loss, weight=number\\)"),
    ("anchor_copied_before+every_fourth_step_skipped", "crash:6", "depend on the number of workers"),
    ("spectral_norm+in_pieces", "stop_before:1 join:8", "depend on the number of workers"),
    ("decay_by_the_mean_loss_after", "stop:6", "variables of the loop .*n, total"),
    ("rate_by_a_meter_of_the_loop", "evict_after:1", "variables of the loop .*self.meter.total"),
    ("untracked_average_of_the_last_epochs", "stop_after:3", "AveragedModel averages weights and is neither"),
    ("mean_of_the_samples_of_earlier_epochs", "join:6", "buffers that step 3 fills depend on the number of workers"),
    ("epochs_of_three_iterations+adamw", "stop:4", "variables of the loop .*islice"),
    ("epochs_of_three_iterations+plateau_of_the_mean", "join:4", "different places"),
    ("every_third_iteration_weighs_more", "stop:5", "variables of the loop .*number"),
]


@pytest.mark.parametrize(("recipe", "history", "words"), FOUND, ids=[recipe for recipe, *_ in FOUND])
def test_what_goes_wrong_in_silence_is_found_by_a_rehearsal(recipe: str, history: str, words: str) -> None:
    verdict = of(recipe, "fast", history)
    assert re.match(f"rehearsed: .*{words}", verdict, re.DOTALL), verdict


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_generated_script_goes_wrong_without_a_word(part: int) -> None:
    """ELASTIC_RECIPES: how many in all; ELASTIC_RECIPES_SEED: others."""
    chosen = drawn(CASES, SEED)[part::PARTS]
    wrong = [f"{case}: {found.why}" for case, found in judge_all(chosen, 1) if found.result == "wrong"]
    assert not wrong, "\n\n".join(wrong)


# The oracle itself


def test_a_history_is_printed_as_it_is_read() -> None:
    for text in HISTORIES:
        assert str(History.parse(text)) == text


def test_a_recipe_is_printed_as_it_is_read_and_may_be_plain() -> None:
    assert str(Recipe.parse("buffer_before+adamw")) == "adamw+buffer_before"
    assert str(Recipe.parse("")) == ""


def test_drawn_cases_are_different_scripts() -> None:
    cases = drawn(30, 1)
    assert len({(case.script, case.reduction) for case in cases}) == len(cases) == 30


# Its documentation


def test_the_page_of_restrictions_has_the_messages_that_scripts_end_with(tmp_path: Path) -> None:
    done = forked.run(restrictions.main, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = restrictions.PAGE.read_text()
    assert restrictions.page(text, done.stdout) == text, "run: python -m tests.elastic_runtime.zoo.restrictions"
