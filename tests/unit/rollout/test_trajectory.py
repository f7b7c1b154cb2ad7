"""Turns, trajectories and what the driver keeps of them."""

import pickle

import pytest
import torch

from grpo_mcore.rollout.trajectory import GenerationRequest, ImageSpan, Trajectory, TrajectoryRef, Turn, fingerprint


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def logprobs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def two_turns(**changes) -> Trajectory:
    """Prompt of 3, answer of 2, observation of 1, answer of 2."""
    fields = {
        "uid": "t:1",
        "generation_index": 3,
        "turns": (
            Turn("user", ids(1, 2, 3), text="what?"),
            Turn("assistant", ids(4, 5), logprobs(-0.5, -0.25), loss_mask=True, text="a"),
            Turn("environment", ids(6), text="no"),
            Turn("assistant", ids(7, 8), logprobs(-1.0, -2.0), loss_mask=True, text="b"),
        ),
        "weight_versions": ((4, 3, 5), (5, 6, 8)),
        "finish_reason": "stop",
        "truncated": False,
    }
    return Trajectory(**{**fields, **changes})


def test_lengths_and_columns_follow_the_turns():
    trajectory = two_turns()
    assert (trajectory.length, trajectory.prompt_length, trajectory.generated_length) == (8, 3, 4)
    assert trajectory.token_ids().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trajectory.logprobs().tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.0, -2.0]
    assert trajectory.loss_mask().tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert trajectory.generated_text == "ab"
    assert trajectory.weight_version == 4


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("generated", [False, True])
def test_a_turn_comes_back_from_a_pickle_as_it_was(tokens: int, generated: bool):
    turn = Turn("user", torch.arange(tokens), torch.rand(tokens) if generated else None, generated, "ä")
    found = pickle.loads(pickle.dumps(turn))
    assert found == turn
    found.token_ids.add_(1)  # its own memory, and writable


CAT, DOG = ("c" * 32, (1, 4, 2)), ("d" * 32, (1, 4, 2))


def test_images_of_turns_travel_and_count_from_the_samples_start():
    shown = Turn("user", ids(4, 6, 6, 5, 1), images=(ImageSpan(1, 2, *CAT),))
    asked = Turn("environment", ids(6, 6, 9, 6, 6), images=(ImageSpan(0, 2, *DOG), ImageSpan(3, 2, *CAT)))
    answer = Turn("assistant", ids(6), logprobs(-1.0), loss_mask=True)  # the policy sampled the id: no image
    trajectory = two_turns(turns=(shown, answer, asked), weight_versions=())
    assert [(i.offset, i.digest) for i in trajectory.images()] == [(1, CAT[0]), (6, DOG[0]), (9, CAT[0])]
    assert pickle.loads(pickle.dumps(shown)) == shown != Turn("user", shown.token_ids)
    with pytest.raises(ValueError, match="has images in its prompt"):
        trajectory.with_prompt(ids(1))
    for wrong in ((ImageSpan(4, 2, *CAT),), (ImageSpan(1, 2, *CAT), ImageSpan(2, 1, *CAT)), (ImageSpan(0, 0, *CAT),)):
        with pytest.raises(ValueError, match="is out of order or beyond the 5 tokens"):
            Turn("user", shown.token_ids, images=wrong)


def test_content_tells_images_apart_and_leaves_text_as_it_is():
    def content(*images):
        return (
            two_turns(turns=(Turn("user", ids(1, 6, 6, 6), images=images),), weight_versions=()).content_ids().tolist()
        )

    assert content() == [1, 6, 6, 6]
    cat, dog = content(ImageSpan(1, 2, *CAT)), content(ImageSpan(1, 2, *DOG))
    assert cat[0] == dog[0] == 1 and cat[3] == dog[3] == 6 and len({*cat[1:3], *dog[1:3]}) == 4
    assert max(*cat[1:3], *dog[1:3]) < 0 and cat == content(ImageSpan(1, 2, *CAT))
    sketches = [
        TrajectoryRef.of(
            two_turns(turns=(Turn("user", ids(*[6] * 64), images=images),), weight_versions=((0, 0, 1),)), None
        )
        for images in ((ImageSpan(0, 64, *CAT),), (ImageSpan(0, 64, *DOG),), ())
    ]
    assert len({sample.prompt_sketch for sample in sketches}) == 3


def test_branches_stand_side_by_side():
    assert two_turns().sequences == (8,)
    branched = two_turns(branches=(5, 3))
    assert branched.sequences == (5, 3) and branched.length == 8
    for wrong in ((5, 4), (8, 0)):
        with pytest.raises(ValueError, match="t:1#3: branches of"):
            two_turns(branches=wrong)
    long = two_turns(turns=(Turn("user", torch.arange(80)),), weight_versions=((1, 0, 80),), branches=(40, 40))
    assert len(TrajectoryRef.of(long, None).prompt_sketch) == 8, "the second branch is another sequence"


def test_a_prompt_of_several_turns_counts_up_to_the_first_generated_one():
    turns = (Turn("system", ids(1)), Turn("user", ids(2, 3)), Turn("assistant", ids(4), logprobs(0.0), loss_mask=True))
    trajectory = two_turns(turns=turns, weight_versions=((0, 3, 4),))
    assert trajectory.prompt_length == 3
    assert two_turns(turns=turns[:2], weight_versions=()).prompt_length == 3


def test_equality_is_of_contents_and_survives_pickling():
    trajectory = two_turns()
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory == two_turns()
    changed = (*trajectory.turns[:3], Turn("assistant", ids(7, 9), logprobs(-1.0, -2.0), True, "b"))
    assert two_turns(turns=changed) != trajectory
    without = (*trajectory.turns[:3], Turn("assistant", ids(7, 8), None, True, "b"))
    assert two_turns(turns=without) != trajectory
    assert hash(Turn("user", ids(1))) == hash(Turn("user", ids(1)))


def test_a_reference_holds_the_numbers_of_its_trajectory():
    ref = TrajectoryRef.of(two_turns(finish_reason="length", truncated=True), ref="somewhere")
    assert ref == TrajectoryRef("t:1", 3, 8, 3, 4, 4, True, "length", "somewhere", turns=2)
    assert ref.environment_tokens == 1
    assert TrajectoryRef.of(two_turns(stop_token=8), None).stop_token == 8


def test_a_request_that_continues_a_trajectory_has_its_tokens_before_its_own():
    said = Turn("user", ids(9), text="go on")
    request = GenerationRequest("t:1", 3, (said,), seed=0, continues=two_turns())
    assert request.turns == (*two_turns().turns, said)
    assert request.token_ids().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_request_joins_its_turns():
    request = GenerationRequest("t:1", 0, (Turn("system", ids(1)), Turn("user", ids(2, 3))), seed=7)
    assert request.token_ids().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": "done"}, r"t:1#3: finish_reason 'done'"),
        ({"weight_versions": ((1, 3, 9),)}, r"span \(1, 3, 9\) .* beyond the 8 tokens"),
        ({"weight_versions": ((1, 3, 6), (2, 5, 8))}, r"span \(2, 5, 8\) is out of order"),
        ({"weight_versions": ((1, 6, 5),)}, r"span \(1, 6, 5\) is out of order"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        two_turns(**changes)


@pytest.mark.parametrize(
    ("token_ids", "values"),
    [
        (torch.tensor([1.0]), None),
        (torch.tensor([1], dtype=torch.int32), None),
        (ids(1)[None], None),
        (ids(1, 2), logprobs(0.0)),
        (ids(1), torch.tensor([0.0], dtype=torch.float64)),
    ],
)
def test_a_turn_with_other_types_or_shapes_is_refused(token_ids, values):
    with pytest.raises(ValueError, match=r"Turn\('user'\)\.(token_ids|logprobs) must be"):
        Turn("user", token_ids, values)


def test_a_trajectory_that_no_engine_generated_has_no_weight_version():
    with pytest.raises(ValueError, match="t:1#3 has no weight version"):
        _ = two_turns(weight_versions=()).weight_version


def test_recorded_experts_are_of_all_tokens_but_the_last():
    length = two_turns().length
    assert two_turns(routed_experts=torch.zeros(length - 1, 2, 4, dtype=torch.int16)).routed_experts is not None
    with pytest.raises(ValueError, match=rf"t:1#3: experts of {length} of the {length} tokens"):
        two_turns(routed_experts=torch.zeros(length, 2, 4, dtype=torch.int16))


def test_fingerprints_tell_sequences_apart() -> None:
    names = {fingerprint(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [1, 2, 3], [2**40])}
    assert len(names) == 7 and fingerprint([1, 2]) == fingerprint((1, 2))
