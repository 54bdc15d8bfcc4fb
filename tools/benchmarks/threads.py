"""P10: as many trials as cores, at one thread each and at torch's default, which is a thread a core for every trial."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import torch
from contenders import MICRO, TINY, Shape, loop, training
from measuring import Row, ratios, row

GATE = 1.5
ROUNDS, BLOCK_S = 5, 1.0


def _trial(pipe: Connection, shape: Shape) -> None:
    step = loop(training(shape))
    while threads := pipe.recv():
        torch.set_num_threads(threads)
        done, began = 0.0, time.perf_counter()
        while (passed := time.perf_counter() - began) < BLOCK_S:
            done += step()
        pipe.send(done / passed)


def measure() -> list[Row]:
    return [_compared("micro", MICRO, GATE), _compared("tiny", TINY, None)]


def _compared(name: str, shape: Shape, gate: float | None) -> Row:
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(cores):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_trial, args=(theirs, shape), daemon=True))
        processes[-1].start()
        pipes.append(ours)

    def speed(threads: int) -> float:
        for pipe in pipes:
            pipe.send(threads)
        return sum(pipe.recv() for pipe in pipes)

    speeds: dict[str, list[float]] = {"one": [], "default": []}
    for turn in range(-1, ROUNDS):  # the first round warms up
        speed_of = {"one": speed(1), "default": speed(cores)}
        if turn >= 0:
            for way, images_s in speed_of.items():
                speeds[way].append(images_s)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    what = f"{name}: {cores} trials at one thread each to {cores} at {cores} threads each"
    return row("P10", what, ratios(speeds, "one", "default"), "x", "wall", gate)
