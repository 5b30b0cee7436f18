"""The arithmetic: arrays as one vector, sums that move as far as their members, a shard and its replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.data import ArrayData
from mlfabric.errors import FabricError, ShapeMismatch
from mlfabric.messages import RulePiece, RuleSpec, ShardRange
from mlfabric.numerics import Layout, ShardStore, Vector
from mlfabric.rules import SGD, Adagrad, Adam, AdamW, Pieces, RMSprop, Rounds, Rule, Sum, make_rule

seeds = st.integers(0, 10**6)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
layouts = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.tuples(shapes, st.sampled_from(["float16", "float32", "float64"])),
    min_size=1,
    max_size=4,
).filter(lambda drawn: any(np.prod(shape, dtype=int) for shape, _ in drawn.values()))


def arrays_of(drawn: dict[str, tuple[tuple[int, ...], str]], seed: int) -> dict[str, Vector]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(dtype) for name, (shape, dtype) in drawn.items()}


# --- layout -------------------------------------------------------------------------------------------------


@given(layouts, seeds)
def test_arrays_come_back_from_the_vector_as_they_went_in(
    drawn: dict[str, tuple[tuple[int, ...], str]], seed: int
) -> None:
    arrays = arrays_of(drawn, seed)
    layout = Layout.of(arrays)
    vector = layout.pack(arrays)
    assert vector.size == layout.elements == sum(array.size for array in arrays.values())
    back = layout.unpack(vector)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


@given(layouts, seeds)
def test_a_vector_is_as_wide_as_its_widest_array(
    drawn: dict[str, tuple[tuple[int, ...], str]], seed: int
) -> None:
    wide = any(dtype == "float64" for _, dtype in drawn.values())
    assert Layout.of(arrays_of(drawn, seed)).dtype == (np.float64 if wide else np.float32)


def test_one_fitting_array_is_lent_and_others_are_packed() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    layout = Layout.of({"w": array})
    lent = layout.as_it_is({"w": array})
    assert lent is not None
    assert np.shares_memory(lent, array)
    assert not np.shares_memory(layout.pack({"w": array}), array)
    turned = np.asfortranarray(array)
    assert layout.as_it_is({"w": turned}) is None
    np.testing.assert_array_equal(layout.pack({"w": turned}), np.arange(6))


MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"w": np.zeros((2, 3))}, ["lacks array 'b'"]),
        ({**MODEL, "c": np.zeros(1)}, ["'c' is not part"]),
        ({**MODEL, "w": np.zeros((3, 2))}, ["'w'", "[3, 2]", "[2, 3]"]),
        ({**MODEL, "w": np.zeros(6)}, ["'w'", "[6]", "[2, 3]"]),
        ({**MODEL, "b": 1.0}, ["'b'", "[]", "[3]"]),
        ({**MODEL, "b": ["x", "y", "z"]}, ["'b'", "numbers"]),
        ({**MODEL, "b": np.zeros(3, complex)}, ["'b'", "complex128"]),
    ],
)
def test_an_update_that_does_not_fit_the_model_gets_one_sentence(
    update: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ShapeMismatch) as caught:
        Layout.of(MODEL).pack(update)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "at least one array"),
        ({"w": np.zeros(3, int)}, "'w' is of int64"),
        ({"w": np.zeros((0, 3))}, "empty"),
    ],
)
def test_what_is_no_model_gets_one_sentence(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeMismatch, match=words):
        Layout.of(model)


# --- rules --------------------------------------------------------------------------------------------------

RULES: list[Rule] = [Sum(), SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01)]
MORE_RULES: list[Rule] = [
    SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    AdamW(0.01, weight_decay=0.1),
    Adagrad(0.1, lr_decay=0.01),
    RMSprop(0.01, momentum=0.5),
    Pieces(((0, 2, SGD(0.1)), (2, 5, Adam(0.01)))),
]


@pytest.mark.parametrize("rule", [*RULES, *MORE_RULES], ids=repr)
def test_a_rule_is_made_again_from_its_spec(rule: Rule) -> None:
    assert make_rule(rule.spec()) == rule


@given(seeds, st.integers(0, 7), st.integers(1, 8))
def test_pieces_cut_at_any_place_move_every_element_as_its_own_rule_does(
    seed: int, first: int, count: int
) -> None:
    """A shard of a model whose elements have different rules: shards side by side equal the whole."""
    draw = np.random.default_rng(seed)
    whole = Pieces(((0, 4, SGD(0.1, momentum=0.9)), (4, 7, Adam(0.05)), (7, 8, Sum())))
    gradients = draw.normal(size=(3, 8))
    expected = moved(whole, list(gradients), 1)
    last = min(first + count, 8)
    part = make_rule(whole.spec(), first, last - first)
    np.testing.assert_array_equal(moved(part, [g[first:last] for g in gradients], 1), expected[first:last])


@pytest.mark.parametrize("rule", [AdamW(0.01), Adagrad(0.1), RMSprop(0.01), RMSprop(0.01, momentum=0.5)])
@pytest.mark.parametrize("group", [2, 4])
def test_sums_move_the_other_rules_about_as_far(rule: Rule, group: int) -> None:
    constant = [np.array([1.0, -0.3, 1e-3])] * 240
    after = {size: moved(rule, constant, size) - moved(rule, constant[:80], size) for size in (1, group)}
    np.testing.assert_allclose(after[group], after[1], rtol=0.15)


def test_unknown_rules_and_settings_get_one_sentence() -> None:
    with pytest.raises(FabricError, match="unknown rule 'LBFGS'; known are SGD, Adam, AdamW"):
        make_rule(RuleSpec("LBFGS"))
    with pytest.raises(FabricError, match="SGD does not take the settings speed"):
        make_rule(RuleSpec("SGD", {"speed": 3.0}))
    for make in (lambda: SGD(-1), lambda: SGD(0.1, momentum=1), lambda: Adam(-1), lambda: Adam(beta1=1)):
        with pytest.raises(FabricError):
            make()


def moved(rule: Rule, gradients: list[Vector], group: int) -> Vector:
    """Where the weights end when gradients come in sums of `group`."""
    store = ShardStore(len(gradients[0]), "float64", rule)
    for first in range(0, len(gradients), group):
        some = gradients[first : first + group]
        store.stage(np.sum(some, axis=0), float(len(some)), len(some))
        store.commit()
    assert store.count == len(gradients)
    return store.weights


@given(seeds, st.integers(1, 9))
def test_plain_descent_on_a_sum_equals_its_members_one_by_one(seed: int, members: int) -> None:
    draw = np.random.default_rng(seed)
    gradients = list(draw.normal(size=(members, 5)))
    for rule in (SGD(0.1), Sum()):
        np.testing.assert_allclose(
            moved(rule, gradients, members), moved(rule, gradients, 1), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("rule", [SGD(0.1, momentum=0.9), SGD(0.1, momentum=0.5), Adam(0.01)], ids=repr)
@pytest.mark.parametrize("group", [2, 4, 8])
def test_sums_move_a_momentum_as_far_per_gradient_as_their_members(rule: Rule, group: int) -> None:
    constant = [np.array([1.0, -0.3, 1e-3])] * 240
    warm = 80
    after = {size: moved(rule, constant, size) - moved(rule, constant[:warm], size) for size in (1, group)}
    np.testing.assert_allclose(after[group], after[1], rtol=0.15)


@pytest.mark.parametrize("rule", [SGD(0.1, momentum=0.9), Adam(0.01, beta1=0.8, beta2=0.95)], ids=repr)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_decays_count_every_member_of_a_sum(rule: Rule, groups: list[int]) -> None:
    """On a constant gradient the state does not depend on how the gradients were summed."""
    gradient = np.array([1.0, -0.3])
    summed, single = ShardStore(2, "float64", rule), ShardStore(2, "float64", rule)
    for members in groups:
        summed.stage(members * gradient, float(members), members)
        summed.commit()
        for _ in range(members):
            single.stage(gradient, 1.0, 1)
            single.commit()
    np.testing.assert_allclose(summed.state, single.state, rtol=1e-9)
    assert summed.count == single.count


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_lone_update_takes_the_textbook_step(rule: Rule) -> None:
    gradient = np.array([2.0, -4.0])
    store = ShardStore(2, "float64", rule)
    store.stage(gradient, 1.0, 1)
    store.commit()
    textbook = {Sum: gradient, SGD: -0.1 * gradient, Adam: -0.01 * np.sign(gradient)}[type(rule)]
    np.testing.assert_allclose(store.weights, textbook, rtol=1e-6)


def test_an_update_of_less_weight_moves_the_model_less() -> None:
    gradient = np.array([2.0])
    full, half = ShardStore(1, "float64", SGD(0.1)), ShardStore(1, "float64", SGD(0.1))
    full.stage(gradient, 1.0, 1)
    half.stage(0.5 * gradient, 0.5, 1)  # the sender multiplies before it sends
    full.commit()
    half.commit()
    np.testing.assert_allclose(half.weights, full.weights / 2)


# --- a shard and its replica --------------------------------------------------------------------------------


def filled(seed: int, rule: Rule, elements: int = 6) -> ShardStore:
    store = ShardStore(elements, "float64", rule)
    draw = np.random.default_rng(seed)
    store.fill(
        np.abs(draw.normal(size=elements * (1 + rule.vectors))), True, 5
    )  # a second moment is positive
    return store


@given(seeds)
def test_divergence_is_the_distance_to_the_farther_image_over_the_norm_after_the_step(seed: int) -> None:
    draw = np.random.default_rng(seed)
    store = filled(seed, SGD(0.1))
    store.image = store.weights + draw.normal(size=6)
    store.coming_image = store.weights + draw.normal(size=6)
    gradient = draw.normal(size=6)
    before = store.weights.copy()
    store.stage(gradient, 1.0, 1)
    step_norm, divergence, norm = store.measure()
    after = before - 0.1 * gradient
    apart = max(np.linalg.norm(after - store.image), np.linalg.norm(after - store.coming_image))
    assert norm == pytest.approx(np.linalg.norm(after))
    assert step_norm == pytest.approx(0.1 * np.linalg.norm(gradient))
    assert divergence == pytest.approx(apart / np.linalg.norm(after))
    np.testing.assert_array_equal(store.weights, before)  # staged is not applied
    store.commit()
    np.testing.assert_allclose(store.weights, after)


def test_divergence_without_a_replica_is_zero_and_from_zero_weights_is_all() -> None:
    store = ShardStore(2, "float64", Sum())
    store.stage(np.zeros(2), 1.0, 1)
    assert store.measure() == (0.0, 0.0, 0.0)
    store.image = np.ones(2)
    assert store.measure()[1] == 1.0


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(seed=seeds)
@settings(max_examples=20)
def test_a_snapshot_fills_a_replica_that_then_steps_alike(rule: Rule, seed: int) -> None:
    leader, replica = filled(seed, rule), ShardStore(6, "float64", rule)
    replica.fill(leader.snapshot(with_state=True, with_staged=False), True, leader.count)
    gradient = np.random.default_rng(seed + 1).normal(size=6)
    for store in (leader, replica):
        store.stage(gradient, 1.0, 1)
        store.commit()
    np.testing.assert_array_equal(replica.weights, leader.weights)
    np.testing.assert_array_equal(replica.state, leader.state)
    assert replica.count == leader.count == 6


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_snapshot_holds_the_staged_step_and_its_state_only_when_asked(rule: Rule) -> None:
    store = filled(3, rule)
    before = store.snapshot(with_state=True, with_staged=False)
    store.stage(np.ones(6), 1.0, 1)
    np.testing.assert_array_equal(store.snapshot(with_state=True, with_staged=False), before)
    ahead = store.snapshot(with_state=True, with_staged=True)
    store.commit()
    np.testing.assert_array_equal(ahead, store.snapshot(with_state=True, with_staged=False))
    assert not np.array_equal(ahead, before)


def test_a_snapshot_is_a_copy() -> None:
    store = filled(3, Sum())
    copy = store.snapshot(with_state=False, with_staged=False)
    store.stage(np.ones(6), 1.0, 1)
    store.commit()
    assert not np.array_equal(copy, store.weights)


# --- buffers ------------------------------------------------------------------------------------------------


def test_what_is_sent_is_ranges_times_a_scale_and_leaves_the_buffer_alone() -> None:
    data = ArrayData()
    data.put("u", np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(data.outgoing("u", (), 1.0)[0], np.arange(10))
    np.testing.assert_array_equal(data.outgoing("u", ((2, 2), (7, 1)), 0.5)[0], [1.0, 1.5, 3.5])
    np.testing.assert_array_equal(data.outgoing("u", (), 1.0)[0], np.arange(10))


@pytest.mark.parametrize(
    ("dtype", "size", "start", "words"),
    [
        ("object", 8, None, "'object' can't be taken"),
        ("float32", 7, None, "no whole number"),
        ("float32", -8, None, "no whole number"),
        ("float32", 2000, None, "no memory for 2000 bytes"),
        ("float32", 8, 3, "does not fit"),
        ("float64", 8, 0, "does not fit"),
    ],
)
def test_transfers_that_have_no_place_get_one_sentence(
    dtype: str, size: int, start: int | None, words: str
) -> None:
    data = ArrayData(limit_bytes=1000)
    data.put("here", np.zeros(4, np.float32))
    with pytest.raises(FabricError, match=words):
        data.incoming("here" if start is not None else "there", dtype, size, start)


def test_a_mirrored_shard_can_be_read_from_its_file(tmp_path: Path) -> None:
    data = ArrayData(mirror=tmp_path)
    data.create_shard(ShardRange(2, 0, 3, "s0"), RuleSpec("Sum"), "float32")
    data.put("u", np.array([1, 2, 3], np.float32))
    data.measure_step(2, "u", 1.0, 1)
    data.commit_step(2)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "shard2.weights", "float32"), [1, 2, 3])


# --- steps of several gradients -----------------------------------------------------------------------------


@given(seeds, st.sampled_from([SGD(0.1, 0.9), Adam(0.01), AdamW(0.01)]), st.integers(2, 5))
def test_a_round_is_one_step_by_the_mean_of_its_gradients(seed: int, rule: Rule, every: int) -> None:
    draw = np.random.default_rng(seed)
    start = draw.normal(size=6)
    plain, rounds = (ShardStore(6, "float64", each, start.copy()) for each in (rule, Rounds(every, rule)))
    for _ in range(3):
        gradients = draw.normal(size=(every, 6))
        plain.stage(gradients.mean(axis=0), 1.0, 1)
        plain.commit()
        for index, gradient in enumerate(gradients):
            before = rounds.weights.copy()
            rounds.stage(gradient, 1.0, 1)
            rounds.commit()
            assert index == every - 1 or np.array_equal(before, rounds.weights)
        np.testing.assert_allclose(rounds.weights, plain.weights, rtol=1e-9, atol=1e-12)


def test_a_round_begins_anew_where_values_come_without_their_state() -> None:
    store = ShardStore(2, "float64", Rounds(2, SGD(1.0)))
    store.stage(np.full(2, 100.0), 1.0, 1)
    store.commit()
    store.fill(np.zeros(2), with_state=False, count=4)
    for _ in range(2):
        store.stage(np.ones(2), 1.0, 1)
        store.commit()
    np.testing.assert_allclose(store.weights, -1.0)


def test_an_update_is_applied_by_the_settings_it_came_with() -> None:
    data = ArrayData()
    data.create_shard(ShardRange(0, 2, 3, "s"), RuleSpec("SGD", {"lr": 1.0}), "float32")
    pieces = tuple(RulePiece(start, start + 2, "SGD", {"lr": start + 1.0}) for start in (0, 2, 4))
    for spec, moved in ((None, [-1, -1, -1]), (RuleSpec("Pieces", {}, pieces), [-3, -3, -5])):
        before = data.shards[0].weights.copy()
        data.put("u", np.ones(3, np.float32))
        data.measure_step(0, "u", 1.0, 1, spec)
        data.commit_step(0)
        np.testing.assert_allclose(data.shards[0].weights - before, moved)
