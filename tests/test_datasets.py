"""Tests of data sets: equal to the published files, and one sentence for every problem."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter

from vitlab.data.datasets import cifar, digits, files, idx
from vitlab.data.datasets.base import Size
from vitlab.data.datasets.cifar import read_pickled_arrays
from vitlab.data.datasets.folder import ImageFolder
from vitlab.data.datasets.synthetic import Synthetic
from vitlab.data.pixels import channel_statistics, convert_channels, resize
from vitlab.data.prepare import DataSource, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import DataError, OptionError
from vitlab.registry import BUILT_IN, list_entries, slot

pytestmark = pytest.mark.usefixtures("elsewhere")

REAL = Path(__file__).parents[2] / "shared" / "data" / "fashion-mnist"
SEEDS = {"split": 0, "subset": 0}


def test_listing_reads_every_builtin_from_source_text() -> None:
    names = ["cifar10", "cifar100", "digit_scenes", "digits", "fashion_mnist", "image_folder", "image_table", "mnist"]
    names += ["pets", "synthetic", "voc_segmentation"]
    assert [entry.name for entry in list_entries("dataset") if entry.origin.source == BUILT_IN] == names
    assert set(names) <= set(slot("dataset").names())


# -- digits -----------------------------------------------------------------------------------------------------------


def test_digits_equal_scikit_learn_with_last_360_as_test() -> None:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    train, test = (digits.Digits().read(split) for split in ("train", "test"))
    assert len(train.y_N) == 1437 and len(test.y_N) == 360
    assert torch.equal(test.y_N, torch.from_numpy(bundle.target[-360:]))
    levels = np.concatenate([train.x_NCHW[:, 0].numpy(), test.x_NCHW[:, 0].numpy()]) / 255.0 * 16
    assert np.abs(levels - bundle.images).max() < 0.04, "16 levels, and no two of them merged"
    assert train.x_NCHW.max() == 255


# -- IDX --------------------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def small_idx(folder: Path, suffix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", 40), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (n, 6, 5))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(n) % 10
    for name, array in arrays.items():
        write_idx(folder / f"{name}{suffix}", array)
    return arrays


@pytest.mark.parametrize("shape", [(40, 0, 5), (40, 6, 0), (40, 0, 0)])
def test_empty_images_are_refused(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    small_idx(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros(shape))
    for load in (data_info, lambda choice: prepare(choice, {"split": 0, "subset": 0})):
        with pytest.raises(DataError, match=rf"train-images.* declares images of {shape[1]} x {shape[2]} pixels"):
            load({"type": "mnist", "root": str(tmp_path)})


@pytest.mark.parametrize("choice", ["mnist", "cifar10", "image_folder", "voc_segmentation"])
def test_impossible_root_is_refused_in_one_sentence(choice: str) -> None:
    for root in ("a" * 5000, "~nobody-of-this-name/x", "a\x00b"):
        try:
            assert DataSource({"type": choice, "root": root}).missing() is not None
        except DataError as error:
            assert "name too long" in str(error) and len(str(error)) < 400


def test_training_images_are_counted_cheaply(tmp_path: Path) -> None:
    seeds = {"split": 0, "subset": 0}
    assert DataSource("digits").count_training_images(seeds) == len(prepare("digits", seeds).train)
    for absent in ({"type": "mnist"}, {"type": "image_folder", "num_classes": 2}):
        assert DataSource({**absent, "root": str(tmp_path)}).count_training_images(seeds) is None


def test_non_text_names_are_refused(tmp_path: Path) -> None:
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / folder / "x.png")
    good = {"type": "image_folder", "root": str(tmp_path), "image_size": 4}
    assert data_info(good).classes == 2
    for name in (b"train/a/\xff.png", b"train/\xffc", b"test/\xffc"):
        path = os.fsencode(tmp_path) + b"/" + name
        if name.endswith(b"png"):
            os.link(tmp_path / "train/a/x.png", path)
        else:
            os.mkdir(path)
        with pytest.raises(DataError, match=r"has a name that is not UTF-8; rename it") as caught:
            data_info(good)
        str(caught.value).encode()
        os.remove(path) if name.endswith(b"png") else os.rmdir(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("layout", [".", "raw", "MNIST/raw", "mnist"])
def test_idx_files_are_found_in_usual_places(tmp_path: Path, layout: str, suffix: str) -> None:
    arrays = small_idx(tmp_path / "d" / layout, suffix)
    mnist = idx.MNIST(root=str(tmp_path / "d"))
    x_NCHW, y_N = mnist.read("test")
    assert x_NCHW.dtype == torch.uint8 and y_N.dtype == torch.int64
    assert np.array_equal(x_NCHW[:, 0].numpy(), arrays["t10k-images-idx3-ubyte"])
    assert np.array_equal(y_N.numpy(), arrays["t10k-labels-idx1-ubyte"])
    assert mnist.info().image == (6, 5)


def test_gzip_does_not_change_identity_but_content_does(tmp_path: Path) -> None:
    small_idx(tmp_path / "plain")
    small_idx(tmp_path / "packed", ".gz")
    small_idx(tmp_path / "other", seed=1)
    plain, packed, other, nowhere = (
        idx.MNIST(root=str(tmp_path / name)).info().identity for name in ("plain", "packed", "other", "nowhere")
    )
    assert plain == packed
    assert len({plain, other, nowhere}) == 3
    path = tmp_path / "plain" / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x03")
    assert idx.MNIST(root=str(tmp_path / "plain")).info().identity != plain


def test_data_changed_since_plan_is_refused(tmp_path: Path) -> None:
    choice = {"type": "mnist", "root": str(tmp_path)}
    planned = data_info(choice).identity
    small_idx(tmp_path)
    with pytest.raises(DataError, match="mnist is not the data this was planned with"):
        prepare(choice, SEEDS, planned)
    planned = data_info(choice).identity
    assert prepare(choice, SEEDS, planned).info.identity == planned
    small_idx(tmp_path, seed=2)
    with pytest.raises(DataError, match="planned with"):
        prepare(choice, SEEDS, planned)


def test_missing_file_message_says_where_and_what_to_do(tmp_path: Path) -> None:
    choice = {"type": "fashion_mnist", "root": str(tmp_path / "nowhere")}
    with pytest.raises(DataError) as caught:
        prepare(choice, SEEDS)
    sentence = str(caught.value)
    assert sentence == DataSource(choice).missing()
    for part in (str(tmp_path / "nowhere"), "FashionMNIST/raw", "train-images-idx3-ubyte", "download: missing"):
        assert part in sentence
    assert data_info(choice).identity is not None, "a plan can be made where the data is not"


def test_usual_folders_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_idx(tmp_path / "cwd" / "data" / "MNIST" / "raw")
    assert DataSource("mnist").missing() is None
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "named"))
    small_idx(tmp_path / "named", seed=1)
    assert data_info("mnist") == data_info({"type": "mnist", "root": str(tmp_path / "named")})


IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "holds 1199"),
        (lambda data: data + b"\0", "holds 1201"),
        (lambda data: b"", "begins with nothing"),
        (lambda data: b"PK" + data[2:], "not an IDX file of unsigned bytes in 3 dimensions: it begins with 504b0803"),
        (lambda data: data[:2] + b"\x0d" + data[3:], "begins with 00000d03"),
        (lambda data: data[:3] + b"\x01" + data[4:], "begins with 00000801"),
        (lambda data: data[:9], "begins with 0000080300000028"),
        (lambda data: data[:4] + b"\xff\xff\xff\xff" + data[8:], "declares 4294967295"),
    ],
)
def test_damaged_idx_file_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:
    small_idx(tmp_path)
    path = tmp_path / IMAGES
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{IMAGES}.*{message}"):
        idx.MNIST(root=str(tmp_path)).read("train")


def test_truncated_archive_is_refused(tmp_path: Path) -> None:
    small_idx(tmp_path, ".gz")
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=f"{IMAGES}.gz is damaged"):
        idx.MNIST(root=str(tmp_path)).read("train")


def test_labels_outside_classes_are_refused(tmp_path: Path) -> None:
    small_idx(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(39) % 10)
    with pytest.raises(DataError, match=r"40 images and .* 39 labels"):
        idx.MNIST(root=str(tmp_path)).read("train")
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(40, 12))
    with pytest.raises(DataError, match="label 12; mnist has 10 classes"):
        idx.MNIST(root=str(tmp_path)).read("train")


def test_torchvision_reads_same_images_and_class_names(tmp_path: Path) -> None:
    small_idx(tmp_path / "MNIST" / "raw")
    theirs = torchvision("torchvision.datasets").MNIST(str(tmp_path), train=True)
    ours = idx.MNIST(root=str(tmp_path)).read("train")
    assert torch.equal(theirs.data, ours.x_NCHW[:, 0]) and torch.equal(theirs.targets, ours.y_N)
    assert list(idx.FashionMNIST.labels) == torchvision("torchvision.datasets").FashionMNIST.classes


def test_download_uses_torchvision_and_lands_in_searched_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torchvision("torchvision.datasets").MNIST
    choice = {"type": "mnist", "root": str(tmp_path / "new"), "download": "missing"}
    assert DataSource(choice).missing() is None

    def refuse(self: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(source, "download", refuse)
    with pytest.raises(DataError, match=r"mnist could not be fetched to .*new: Error downloading"):
        prepare(choice, SEEDS)
    monkeypatch.setattr(source, "download", lambda self: small_idx(Path(self.raw_folder)))
    assert len(prepare(choice, SEEDS).test) == 20
    monkeypatch.setattr(source, "download", refuse)
    assert len(prepare({**choice, "normalize": "half"}, SEEDS).test) == 20, "what is here is not fetched again"


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="Fashion-MNIST is not on this machine")
def test_real_fashion_mnist_has_published_checksums() -> None:
    fashion = idx.FashionMNIST(root=str(REAL))
    published = files.identity_of_files("fashion_mnist", idx.FashionMNIST.required)
    assert fashion.info().identity == published
    for split, n in (("train", 60000), ("test", 10000)):
        x_NCHW, y_N = fashion.read(split)
        assert x_NCHW.shape == (n, 1, 28, 28)
        assert y_N.bincount().tolist() == [n // 10] * 10
    # The usual mean and deviation of Fashion-MNIST.
    mean, std = channel_statistics([fashion.read("train").x_NCHW])
    assert mean[0] == pytest.approx(0.2860, abs=1e-4) and std[0] == pytest.approx(0.3530, abs=1e-4)


# -- CIFAR ------------------------------------------------------------------------------------------------------------


def python2_batch(x_ND: np.ndarray, y_N: list[int], key: str) -> bytes:
    """Return a batch as pickled by Python 2: protocol 2, byte strings, numpy's old module."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R" + b"(K\x03" + string(b"|") + b"NNN"
    dtype += integer(-1) + integer(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    array += (
        b"(K\x01" + integer(len(x_ND)) + integer(x_ND.shape[1]) + b"\x86" + dtype + b"\x89" + string(x_ND.tobytes())
    )
    array += b"tb"
    labels = b"](" + b"".join(integer(y) for y in y_N) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(key.encode()) + labels + b"u."


def small_cifar(folder: Path, kind: type[cifar.Cifar], writer=python2_batch) -> dict[str, tuple[np.ndarray, list[int]]]:
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    batches = {}
    for name in kind.required:
        x_ND, y_N = random.integers(0, 256, (20, 3072), np.uint8), [i % 10 for i in range(20)]
        (folder / name).write_bytes(writer(x_ND, y_N, kind.key))
        batches[name] = (x_ND, y_N)
    return batches


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", [cifar.CIFAR10, cifar.CIFAR100])
def test_cifar_batches_are_read_in_order(tmp_path: Path, kind: type[cifar.Cifar], protocol: int) -> None:
    def python3_batch(x_ND: np.ndarray, y_N: list[int], key: str) -> bytes:
        return pickle.dumps({"data": x_ND, key: y_N}, protocol=4)

    batches = small_cifar(tmp_path / kind.layouts[0], kind, python2_batch if protocol == 2 else python3_batch)
    images = kind(root=str(tmp_path)).read("train")
    names = kind.batches["train"]
    assert np.array_equal(images.x_NCHW.flatten(1).numpy(), np.concatenate([batches[name][0] for name in names]))
    assert images.y_N.tolist() == [label for name in names for label in batches[name][1]]
    # numpy and pickle agree with the hand-written stream
    loaded = pickle.loads((tmp_path / kind.layouts[0] / names[0]).read_bytes(), encoding="latin1")
    assert np.array_equal(loaded["data"], batches[names[0]][0])


def test_cifar_checksums_and_pixels_equal_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torchvision("torchvision.datasets")
    for kind in (cifar.CIFAR10, cifar.CIFAR100):
        source = getattr(theirs, kind.torchvision_name)
        assert dict(source.train_list + source.test_list) == dict(kind.required)
        assert source.base_folder == kind.layouts[0]
    small_cifar(tmp_path / "cifar-10-batches-py", cifar.CIFAR10)
    monkeypatch.setattr(theirs.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(theirs.CIFAR10, "_load_meta", lambda self: None)
    images = theirs.CIFAR10(str(tmp_path)).data
    assert np.array_equal(images, cifar.CIFAR10(root=str(tmp_path)).read("train").x_NCHW.permute(0, 2, 3, 1).numpy())


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    small_cifar(tmp_path / "d", cifar.CIFAR10)
    evil = pickle.dumps({"data": Malicious(tmp_path / "owned"), "labels": [0]})
    (tmp_path / "d" / "test_batch").write_bytes(evil)
    with pytest.raises(DataError, match=r"test_batch.*names (posix|nt)\.mkdir.*nothing was run"):
        cifar.CIFAR10(root=str(tmp_path / "d")).read("test")
    assert not (tmp_path / "owned").exists()
    pickle.loads(evil)
    assert (tmp_path / "owned").exists(), "it would have"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": np.array([object()], dtype=object)}, 4), "names builtins.object"),
        (pickle.dumps({"data": np.zeros(3)}, 4), "an array that is not of unsigned bytes"),
        (pickle.dumps([1, 2]), "a list, not a mapping"),
        (pickle.dumps({"data": np.zeros(9, np.uint8)}, 4)[:-20], "test_batch"),
        (b"", "damaged"),
        (b"\x80\x02garbage", "test_batch"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "names builtins.eval"),
        (b"cnumpy\nndarray\n(I9999999999\ntR.", "not a mapping"),
        (pickle.dumps({"data": np.zeros((2, 3), np.uint8, order="F")}, 4), "stored by rows"),
    ],
)
def test_non_byte_array_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_pickled_arrays(path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [0]}, "'data' must be unsigned bytes"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "must be a list of 2 classes"),
        ({"data": np.zeros((2, 3), np.uint8), "labels": [0, 1]}, "3072"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "a list of 2 classes from 0 to 9"),
    ],
)
def test_batch_with_other_content_is_refused(tmp_path: Path, batch: dict, message: str) -> None:
    small_cifar(tmp_path, cifar.CIFAR10)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, 4))
    with pytest.raises(DataError, match=message):
        cifar.CIFAR10(root=str(tmp_path)).read("test")


# -- folders of pictures ----------------------------------------------------------------------------------------------


def small_folder(root: Path, test: str = "test") -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for split, n in (("train", 4), (test, 2)):
        for label in ("cat", "dog"):
            for i in range(n):
                folder = root / split / label / ("deep" if i == 0 else "")
                folder.mkdir(parents=True, exist_ok=True)
                pixels = random.integers(0, 256, (12, 20, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.{'png' if i % 2 else 'JPG'}")
    (root / "train" / "cat" / "notes.txt").write_text("not a picture")


@pytest.mark.parametrize("test", ["test", "val"])
def test_image_folder_equals_torchvision(tmp_path: Path, test: str) -> None:
    small_folder(tmp_path, test)
    ours = ImageFolder(root=str(tmp_path), image_size=(6, 10), fit="squash")
    info = ours.info()
    assert (info.classes, info.labels, info.image, info.channels) == (2, ("cat", "dog"), (6, 10), 3)
    theirs = torchvision("torchvision.datasets").ImageFolder(str(tmp_path / "train"))
    resize = torchvision("torchvision.transforms.functional").resize
    expected = {}
    for path, label in theirs.samples:
        image = resize(theirs.loader(path), [6, 10])
        expected[np.asarray(image).tobytes()] = label
    x_NCHW, y_N = ours.read("train")
    assert len(x_NCHW) == 8
    label_of = {x.permute(1, 2, 0).numpy().tobytes(): int(y) for x, y in zip(x_NCHW, y_N, strict=True)}
    assert label_of == expected
    assert len(ours.read("test").y_N) == 4


def test_picture_is_centre_cropped(tmp_path: Path) -> None:
    from PIL import Image

    small_folder(tmp_path)
    path = tmp_path / "train" / "cat" / "1.png"
    x_NCHW, _ = ImageFolder(root=str(tmp_path), image_size=(12, 12)).read("train")
    with Image.open(path) as image:
        middle = np.asarray(image)[:, 4:16].transpose(2, 0, 1)
    assert any(np.array_equal(x.numpy(), middle) for x in x_NCHW)


def test_folder_identity_depends_on_content(tmp_path: Path) -> None:
    small_folder(tmp_path / "a")
    small_folder(tmp_path / "b")
    a, b = (ImageFolder(root=str(tmp_path / name)) for name in "ab")
    assert a.info().identity == b.info().identity
    before = b.info().identity
    (tmp_path / "b" / "train" / "cat" / "1.png").rename(tmp_path / "b" / "train" / "dog" / "9.png")
    other = b.info().identity
    assert other != before
    path = tmp_path / "b" / "test" / "cat" / "1.png"
    path.write_bytes(path.read_bytes() + b"\0")
    assert b.info().identity not in (other, before)


@pytest.mark.parametrize("root", [".", "./", "../a", "../a/", "../../{0}/a"])
def test_folder_identity_does_not_depend_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    small_folder(tmp_path / "a")
    absolute = ImageFolder(root=str(tmp_path / "a")).info().identity
    monkeypatch.chdir(tmp_path / "a")
    assert ImageFolder(root=root.format(tmp_path.name)).info().identity == absolute


def test_folder_mistakes_are_reported(tmp_path: Path) -> None:
    nowhere = {"type": "image_folder", "root": str(tmp_path / "nowhere")}
    with pytest.raises(DataError, match=r"no folder .*nowhere; .* To plan without it.*num_classes"):
        data_info(nowhere)
    info = data_info({**nowhere, "num_classes": 7})
    assert info.classes == 7 and info.identity is None
    small_folder(tmp_path / "d")
    with pytest.raises(DataError, match="has 2 classes, num_classes says 7"):
        data_info({"type": "image_folder", "root": str(tmp_path / "d"), "num_classes": 7})
    (tmp_path / "d" / "train" / "cat" / "1.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"cat.1\.png cannot be read as a picture: cannot identify image file"):
        prepare({"type": "image_folder", "root": str(tmp_path / "d"), "image_size": 4}, SEEDS)
    (tmp_path / "d" / "test" / "cow").mkdir()
    with pytest.raises(DataError, match="class 'cow'"):
        data_info({"type": "image_folder", "root": str(tmp_path / "d")})
    (tmp_path / "d" / "test" / "cow").rmdir()
    huge = {"type": "image_folder", "root": str(tmp_path / "d"), "image_size": 10**6, "decoded": "memory"}
    with pytest.raises(DataError, match="GiB"):
        prepare(huge, SEEDS)


# -- synthetic --------------------------------------------------------------------------------------------------------


def test_synthetic_images_are_learnable_balanced_and_reproducible() -> None:
    from sklearn.linear_model import LogisticRegression

    one, two = (Synthetic(image_size=(8, 8), num_channels=3, num_classes=5) for _ in range(2))
    train, test = one.read("train"), one.read("test")
    assert torch.equal(train.x_NCHW, two.read("train").x_NCHW)
    assert train.x_NCHW.shape == (512, 3, 8, 8)
    assert set(train.y_N.bincount().tolist()) <= {102, 103}
    fitted = LogisticRegression(max_iter=500).fit(train.x_NCHW.flatten(1).numpy() / 255, train.y_N)
    assert fitted.score(test.x_NCHW.flatten(1).numpy() / 255, test.y_N) > 0.95
    nothing = Synthetic(image_size=(8, 8), num_classes=5, contrast=0.0)
    x_ND, test_ND = (nothing.read(split).x_NCHW.flatten(1).numpy() / 255 for split in ("train", "test"))
    assert LogisticRegression(max_iter=500).fit(x_ND, train.y_N).score(test_ND, test.y_N) < 0.4


# -- common options ---------------------------------------------------------------------------------------------------


def test_resize_and_channels_equal_pillow() -> None:
    from PIL import Image

    x_NCHW = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 9, 12), np.uint8))
    for x_CHW, small, gray in zip(x_NCHW, resize(x_NCHW, (5, 7)), convert_channels(x_NCHW, 1), strict=True):
        image = Image.fromarray(x_CHW.permute(1, 2, 0).numpy())
        pillow = np.asarray(image.resize((7, 5), Image.Resampling.BILINEAR))
        assert np.array_equal(small.permute(1, 2, 0).numpy(), pillow)
        assert np.array_equal(gray[0].numpy(), np.asarray(image.convert("L")))
    assert torch.equal(convert_channels(x_NCHW[:, :1], 3)[:, 2], x_NCHW[:, 0])


def test_statistics_equal_numpy() -> None:
    x_NCHW = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 2, 4, 4), np.uint8))
    mean, std = channel_statistics([x_NCHW])
    assert mean == pytest.approx((x_NCHW.numpy() / 255).mean((0, 2, 3)))
    assert std == pytest.approx((x_NCHW.numpy() / 255).std((0, 2, 3)))
    assert channel_statistics([torch.full((2, 1, 2, 2), 7, dtype=torch.uint8)])[1] == (1 / 255,)


def test_options_change_prepared_images() -> None:
    info = data_info({"type": "digits", "size": [16, 8], "channels": 3, "classes": [3, 1]})
    assert (info.image, info.channels, info.classes, info.labels) == ((16, 8), 3, 2, ("3", "1"))
    prepared = prepare({"type": "digits", "size": [16, 8], "channels": 3, "classes": [3, 1]}, SEEDS)
    assert prepared.info == info
    assert prepared.train.x_NCHW.shape[1:] == (3, 16, 8)
    whole = prepare("digits", SEEDS)
    label_of = dict(zip(whole.train.id_N.tolist(), whole.train.y_N.tolist(), strict=True))
    for identity, label in zip(prepared.train.id_N.tolist(), prepared.train.y_N.tolist(), strict=True):
        assert label_of[identity] == [3, 1][label], "a class keeps the images, and their roles, that it has alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "datset"}, "found 'datset'; allowed: dataset, half.*Did you mean 'dataset'"),
        ({"normalize": {"mean": [0.5], "std": [1, 2]}}, "mean has 1 numbers and std 2"),
        ({"size": 0}, r"one number of pixels or \[height, width\], found 0"),
        ({"size": "big"}, "found 'big'"),
        (
            {"size": True},
            "size: found a boolean; a number is allowed. YAML reads yes, no, on and off as booleans",
        ),
        (
            {"channels": True},
            "channels: found a boolean; 1 or 3 is allowed. YAML reads yes, no, on and off as booleans",
        ),
        ({"channels": 2}, "channels: .*1"),
        ({"fraction": 0}, "greater than 0"),
        ({"validation": 1.0}, "less than 1"),
        ({"classes": [1, 1]}, "listed twice"),
        ({"augment": ["flop"]}, "no augment called 'flop'.*Did you mean 'flip'"),
        ({"augment": [{"type": "flip", "p": 2}]}, "less than or equal to 1"),
        ({"rot": 3}, "no option 'rot'"),
    ],
)
def test_wrong_option_raises_one_sentence(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        slot("dataset").resolve_choice({"type": "digits", **options})


def test_options_unsuited_to_data_are_found_in_planning() -> None:
    with pytest.raises(DataError, match="digits has classes 0 to 9; found 10"):
        data_info({"type": "digits", "classes": [1, 10]})
    with pytest.raises(DataError, match="3 numbers for 1 channels"):
        data_info({"type": "digits", "normalize": "imagenet"})
    assert data_info({"type": "digits", "channels": 3, "normalize": "imagenet"}).channels == 3


def test_resolved_choice_survives_json_and_key_excludes_paths(tmp_path: Path) -> None:
    choice = {
        "type": "mnist",
        "root": str(tmp_path),
        "size": 8,
        "normalize": {"mean": 0.1, "std": 0.3},
        "augment": ["flip", {"type": "random_resized_crop", "scale": [0.5, 1]}],
    }
    resolution = slot("dataset").resolve_choice(choice)
    again = slot("dataset").resolve_choice(resolution.plain())
    assert again == resolution and again.plain() == resolution.plain()
    assert "root" not in resolution.hashed() and "download" not in resolution.hashed()
    assert resolution.hashed() == slot("dataset").resolve_choice({**choice, "root": "/elsewhere"}).hashed()


def test_json_schema_of_size_matches_yaml() -> None:
    branches = TypeAdapter(Size).json_schema()["anyOf"]
    assert [branch["type"] for branch in branches] == ["integer", "array"]
    assert branches[1]["minItems"] == branches[1]["maxItems"] == 2
