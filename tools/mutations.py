"""Seeded random mutations of JSON-like trees, texts and bytes, shared by the fuzzers.

Every function draws from the given ``random.Random`` alone, so a mutant is reproduced by its seed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Place = tuple[str | int, ...]

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, -(2**31), 2**31, 2**63, 2**64 + 1, 10**12, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -0.5, 1e-300, 1e300, 1.7e308, math.inf, -math.inf, math.nan),
)
TEXTS: tuple[str, ...] = (
    *("", " ", "none", "null", "no", "true", "auto", "~", "-", ".", "..", "../up", "../../../etc/passwd", "/", "/dev/null"),
    *("a/b", "a\\b", "C:\\x", "~/x", "$HOME", "${HOME}", "{{7*7}}", "%s%n", "*", "?", "[a]", "'", '"', "`id`", "$(id)", "; ls"),
    *("a" * 300, "é" * 200, "a" * 5000, "/" + "a/" * 2000, "\U0001d54d", "\u202e", "\u0430\u0441\u0441", "\u2028", "\ufeff", "na\u0308me"),
    *("__import__('os')", "os:system", "vitlab:vit", "vitlab:", ":", "x:y:z", "type", "model.dim", "model..dim", ".model", "1e5", "0x10"),
    *("val/accuracy", "val/acc", "test/loss", "train/loss", "/", "val/", "2 points", "50 %", "6GiB", "model.dim > 0", "1/0 > 0"),
)  # fmt: skip

PIECES: tuple[str, ...] = (
    *"{}[]:,#&*!|>'\"%@`-? \n\t0123456789eE.+-_~/\\\x00\x1b\x7f\ufeff\u2028\u201cä\U0001d54d",
    *("no", "null", "1e999", "-1", "0", "[]", "{}", "<<: *a", "&a ", "*a", "!!set", "!!int ", "!!python/name:os.system ", "? "),
    *("--- ", "\r\n", "- ", ": ", "[[[[", "}}}}", "nan", ".inf", "base:", "type: ", "\n  ", "\n\t", "'", "${x}"),
)  # fmt: skip
"""What is put into texts: characters and words that mean something in YAML or JSON."""


def places(tree: Any, here: Place = ()) -> list[Place]:
    """Return the path of every value in a tree of mappings and lists, the root first."""
    paths = [here]
    if isinstance(tree, dict):
        for key, value in tree.items():
            paths += places(value, (*here, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            paths += places(value, (*here, index))
    return paths


def value_at(tree: Any, place: Place) -> Any:
    """Return the value at a path."""
    for part in place:
        tree = tree[part]
    return tree


def replaced(tree: Any, place: Place, value: Any) -> Any:
    """Return the tree with another value at a path; the tree itself is changed where the path is not empty."""
    if not place:
        return value
    value_at(tree, place[:-1])[place[-1]] = value
    return tree


def random_value(rng: Random, depth: int = 3) -> Any:
    """Return a value of a random type: number, text, truth, nothing, list or mapping."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.randrange(-3, 20)
    if kind == 4:
        return rng.uniform(-2, 2)
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TEXTS): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return {"type": random_value(rng, depth - 1)}


def mutate_tree(rng: Random, tree: Any, changes: int = 3) -> Any:
    """Return a copy of a tree of mappings and lists with one to ``changes`` random changes."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, changes)):
        tree = rng.choice(_TREE_CHANGES)(rng, tree)
    return tree


def mutate_text(rng: Random, text: str, changes: int = 4) -> str:
    """Return a text with one to ``changes`` accidents: characters and lines deleted, doubled, moved or inserted."""
    for _ in range(rng.randint(1, changes)):
        at = rng.randint(0, len(text))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at] + text[at + rng.randint(1, 12) :]
        elif kind == 1:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 2:
            text = text[:at] + rng.choice(PIECES) + text[at + rng.randint(1, 6) :]
        elif kind == 3:
            text = text[:at] + chr(rng.choice((rng.randrange(0x20, 0x500), rng.randrange(0x20, 0xD800)))) + text[at:]
        elif kind == 4:
            text = text[:at]
        else:
            lines = text.splitlines(keepends=True)
            if lines:
                number = rng.randrange(len(lines))
                line = lines[number]
                lines[number] = rng.choice(("", line * 2, "  " + line, "\t" + line, line.lstrip(" "), line.upper()))
                if rng.random() < 0.2:
                    rng.shuffle(lines)
            text = "".join(lines)
    return text


def mutate_bytes(rng: Random, data: bytes, changes: int = 4) -> bytes:
    """Return bytes with one to ``changes`` faults: bits flipped, parts cut, zeroed, doubled, or all of it gone."""
    for _ in range(rng.randint(1, changes)):
        at = rng.randint(0, len(data))
        end = at + rng.choice((1, 4, 64, len(data)))
        kind = rng.randrange(7)
        if kind == 0 and data:
            spot = rng.randrange(len(data))
            data = data[:spot] + bytes([data[spot] ^ (1 << rng.randrange(8))]) + data[spot + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + bytes(len(data[at:end])) + data[end:]
        elif kind == 3:
            data = data[:at] + data[end:]
        elif kind == 4:
            data = data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]
        elif kind == 5:
            data = data[:end] + data[at:end] + data[end:]
        elif rng.random() < 0.2:
            data = b""
    return data


def _replace_value(rng: Random, tree: Any) -> Any:
    return replaced(tree, rng.choice(places(tree)), random_value(rng))


def _delete(rng: Random, tree: Any) -> Any:
    place = rng.choice(places(tree))
    if place:
        del value_at(tree, place[:-1])[place[-1]]
    return tree


def _rename_key(rng: Random, tree: Any) -> Any:
    keys = [place for place in places(tree) if place and isinstance(place[-1], str)]
    if keys:
        place = rng.choice(keys)
        parent, key = value_at(tree, place[:-1]), str(place[-1])
        at = rng.randint(0, len(key))
        name = rng.choice(
            (key[:at] + key[at + 1 :], key[:at] + rng.choice("xo_\u043e") + key[at:], key.upper(), rng.choice(TEXTS))
        )
        parent[name] = parent.pop(key)
    return tree


def _move(rng: Random, tree: Any) -> Any:
    """Copy the value of one place to another."""
    paths = places(tree)
    return replaced(tree, rng.choice(paths), copy.deepcopy(value_at(tree, rng.choice(paths))))


def _wrap(rng: Random, tree: Any) -> Any:
    place = rng.choice(places(tree))
    value: Any = value_at(tree, place)
    for _ in range(rng.choice((1, 1, 1, 2, 60))):
        value = rng.choice(([value], {"type": value}, {rng.choice(TEXTS): value}))
    return replaced(tree, place, value)


def _add_key(rng: Random, tree: Any) -> Any:
    paths = [place for place in places(tree) if isinstance(value_at(tree, place), dict)]
    names: Sequence[Any] = [place[-1] for place in places(tree) if place and isinstance(place[-1], str)]
    if paths:
        value_at(tree, rng.choice(paths))[rng.choice([*names, *TEXTS])] = random_value(rng)
    return tree


def _extend_list(rng: Random, tree: Any) -> Any:
    paths = [place for place in places(tree) if isinstance(value_at(tree, place), list)]
    if paths:
        items = value_at(tree, rng.choice(paths))
        items.insert(
            rng.randint(0, len(items)), random_value(rng) if rng.random() < 0.6 or not items else rng.choice(items)
        )
    return tree


def _change_number(rng: Random, tree: Any) -> Any:
    numbers = [place for place in places(tree) if type(value_at(tree, place)) in (int, float)]
    if numbers:
        place = rng.choice(numbers)
        old = value_at(tree, place)
        new = rng.choice(
            (-old, 0, old + 1, old - 1, float(old) if abs(old) < 1e300 else 0.0, str(old), rng.choice(NUMBERS))
        )
        return replaced(tree, place, new)
    return tree


_TREE_CHANGES: tuple[Callable[[Random, Any], Any], ...] = (
    _replace_value,
    _replace_value,
    _delete,
    _rename_key,
    _move,
    _wrap,
    _add_key,
    _extend_list,
    _change_number,
)
