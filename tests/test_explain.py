"""Seeing inside: each number against a formula or an independent float64 computation, each picture against a check."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import vitlab
from vitlab.errors import SpecError
from vitlab.execution import Watch
from vitlab.explain.distance import attention_distance, patch_distances
from vitlab.explain.probes import filter_components, position_similarity, token_cosine, token_norms
from vitlab.explain.rollout import rollout, to_patches
from vitlab.geometry import Geometry


def geometry(image: int, patch: int, prefix: tuple[str, ...] = ("class",)) -> Geometry:
    side = image // patch
    return Geometry(
        image=(image, image),
        channels=3,
        patch=(patch, patch),
        grid=(side, side),
        prefix=prefix,
        dim=8,
        depth=2,
        heads=2,
        classes=3,
    )


def random_maps(*shape: int, blocks: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).softmax(-1) for _ in range(blocks)]


# Uniform attention, from the formula summed by an independent script: image, patch, mean distance in pixels.
UNIFORM = [(224, 16, 116.492), (224, 32, 115.503), (224, 14, 116.565), (32, 4, 16.546), (32, 2, 16.652)]


@pytest.mark.parametrize(("image", "patch", "expected"), UNIFORM)
def test_uniform_attention_has_the_mean_distance_of_its_grid(image: int, patch: int, expected: float) -> None:
    g = geometry(image, patch, ())
    maps = torch.full((1, 2, g.tokens, g.tokens), 1 / g.tokens, dtype=torch.float64)
    assert attention_distance(maps, g).tolist() == [[pytest.approx(expected, abs=5e-4)] * 2]


def test_identity_attention_has_no_distance_and_corners_are_the_farthest() -> None:
    g = geometry(224, 16, ("class",))
    maps = torch.eye(g.tokens, dtype=torch.float64).expand(1, 1, -1, -1)
    assert float(attention_distance(maps, g)) == 0
    assert float(patch_distances(g).max()) == pytest.approx(294.16, abs=5e-3)


def test_attention_to_prefix_tokens_is_dropped_or_redistributed() -> None:
    g = geometry(32, 8, ("class", "register"))
    maps = torch.zeros(1, 1, g.tokens, g.tokens, dtype=torch.float64)
    maps[..., 0] = 0.5
    maps[..., 2:] = 0.5 / g.patches
    dropped = float(attention_distance(maps, g))
    assert float(attention_distance(maps, g, prefix_weight="redistributed")) == pytest.approx(2 * dropped)


def test_distances_on_a_grid_that_is_not_square() -> None:
    g = replace(geometry(32, 8), image=(16, 32), grid=(2, 4), patch=(8, 8))
    assert float(patch_distances(g)[0, 7]) == pytest.approx(np.hypot(8, 24))


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard", [0.0, 0.6])
def test_rollout_against_numpy_image_by_image(fusion: str, discard: float) -> None:
    maps = random_maps(3, 4, 7, 7)
    found = rollout(maps, fusion=fusion, discard=discard)  # type: ignore[arg-type]
    for image in range(3):
        product = np.eye(7)
        for block in maps:
            fused = getattr(block[image].numpy(), fusion)(axis=0)
            if discard:
                flat = fused.ravel().copy()
                flat[np.argsort(flat)[: int(flat.size * discard)]] = 0
                fused = flat.reshape(7, 7)
            step = fused + np.eye(7)
            product = (step / step.sum(axis=1, keepdims=True)) @ product
        np.testing.assert_allclose(found[image].numpy(), product, atol=1e-14)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 7, dtype=torch.float64))


def test_rollout_of_a_planted_patch_peaks_there() -> None:
    g = geometry(32, 8, ("class", "register"))
    maps = [torch.full((1, 2, g.tokens, g.tokens), 1e-3, dtype=torch.float64) for _ in range(2)]
    planted = 2 + 1 * 4 + 3
    for block in maps:
        block[..., planted] = 1
        block /= block.sum(-1, keepdim=True)
    heat = to_patches(rollout(maps), g)["class"][0]
    assert divmod(int(heat.argmax()), 4) == (1, 3)


def test_rollout_speaks_for_the_tokens_a_model_has() -> None:
    assert set(to_patches(rollout(random_maps(1, 2, 18, 18)), geometry(32, 8, ("class", "distillation")))) == {
        "class",
        "distillation",
    }
    g = geometry(32, 8, ())
    rolled = rollout(random_maps(1, 2, 16, 16))
    mean = to_patches(rolled, g)
    assert list(mean) == ["mean"]
    torch.testing.assert_close(mean["mean"].flatten(1), rolled.mean(1))


def test_filter_components_are_orthonormal_and_explain_what_scikit_learn_says() -> None:
    from sklearn.decomposition import PCA

    weight = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    found = filter_components(weight, 10)
    flat = found.filters_KCHW.flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(10, dtype=torch.float64))
    reference = PCA(10, svd_solver="full").fit(weight.double().flatten(1).numpy())
    np.testing.assert_allclose(found.share_K.numpy(), reference.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(np.abs(np.sum(flat.numpy() * reference.components_, axis=1)), 1, rtol=1e-9)


def test_position_similarity_is_a_cosine() -> None:
    g = geometry(16, 8, ())
    table = torch.tensor([[1.0, 0], [0, 2], [-3, 0], [1, 1]])
    found = position_similarity(table, g)
    assert found.shape == (2, 2, 2, 2)
    assert found[0, 0].flatten().tolist() == pytest.approx([1, 0, -1, 2**-0.5])


def test_token_cosine_by_depth() -> None:
    g = geometry(16, 8, ("class", "distillation"))
    tokens = torch.zeros(2, g.tokens, 2)
    tokens[:, 0, 0] = 1
    tokens[0, 1, 0], tokens[1, 1, 1] = 1, 1
    assert token_cosine([tokens, tokens], g).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="pair"):
        token_cosine([tokens], geometry(16, 8))


def test_token_norm_outliers_by_a_threshold_that_moves_with_the_model() -> None:
    g = geometry(32, 4, ("class",))
    tokens = torch.randn(1, g.tokens, 16, generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = 1e6  # the class token is no patch
    assert token_norms(tokens, g).outliers == 0
    tokens[0, 5] *= 100
    for scale in (1, 400):
        found = token_norms(tokens * scale, g)
        assert found.outliers == 1 / g.patches and found.ratio > 50


# -- as artifacts of a trial ------------------------------------------------------------------------------------------


def test_a_study_explains_the_first_seed_of_every_arm_it_can(tmp_path: Path) -> None:
    study = {
        "study": "explained",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 2, "batch_size": 8},
        },
        "design": {"one_at_a_time": {"model": ["resnet8"]}},
        "seeds": 2,
        "run": {"executor": "inline", "tracking_uri": "http://127.0.0.1:9"},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study, sort_keys=False))
    told: list[str] = []

    class Ear(Watch):
        def say(self, sentence: str) -> None:
            told.append(sentence)

    vitlab.run(file, out=tmp_path / "out")
    answer = vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3, 359]}, watch=Ear())
    assert (answer.trained, answer.cached) == (0, 4), "to explain is not to train"
    trial = answer.plan.find("baseline", 0)
    folder = answer.store.trial(trial.key, trial.code)
    assert {path.name for path in (folder.path / "explain").iterdir()} == {"test-3", "test-359"}
    assert (folder.path / "explain" / "test-3" / "rollout_class.png").exists()
    other = answer.plan.find("baseline", 1)
    assert not (answer.store.trial(other.key, other.code).path / "explain").exists()
    assert [sentence for sentence in told if "model=resnet8 is not explained" in sentence]

    before = (folder.path / "explain" / "test-3").stat().st_mtime_ns
    vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3, 400]}, watch=Ear())
    assert (folder.path / "explain" / "test-3").stat().st_mtime_ns == before
    assert any("no test image 400: the split has 360" in sentence for sentence in told)
    with pytest.raises(SpecError, match="keep its weights"):
        vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3], "run.keep": "none"})
