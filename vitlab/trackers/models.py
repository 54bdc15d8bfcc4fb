"""One trained model per arm as an MLflow logged model, enabled by ``models: arms`` in ``run.tracker``.

A model consists of the trial's spec and its weights as safetensors, which suffice to predict and hold no code.
``vitlab.load`` reads the folder that MLflow returns.  MLflow's PyTorch flavour is not used: it stores either a
pickle, which executes code when loaded, or a traced program of one input shape.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.spec import Analysis
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Ending
from vitlab.trackers import records
from vitlab.trackers.replay import TrackedTrial

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

READY = "READY"
KIND, MODEL, SUPERSEDED = "vitlab.kind", "model", "superseded"
NAME = re.compile(r"[/:.%\"']")  #: characters that MLflow allows in no model name
README = """# {name}

Where MLFLOW_TRACKING_URI names this server:

```python
import mlflow, vitlab

folder = mlflow.artifacts.download_artifacts("models:/{model}")
model, transform = vitlab.load(folder)
logits = model(transform(images)).logits
```
"""


def select_trials(trials: Iterable[TrackedTrial], seed: int | None) -> list[TrackedTrial]:
    """Return each arm's trial with the given seed; by default its first trial."""
    selected: dict[str, TrackedTrial] = {}
    for item in trials:
        if item.kind == "trial" and seed in (None, item.planned.seed):
            selected.setdefault(item.planned.arm, item)
    return list(selected.values())


def deliver(
    client: MlflowClient,
    experiment: str,
    root: str,
    selected: Sequence[tuple[TrackedTrial, TrialFolder, str]],
    analysis: Analysis,
) -> dict[str, str]:
    """Store the trained models that MLflow does not have yet.  May raise MLflow's exceptions.

    Args:
        client: MLflow's client.
        experiment: id of the experiment.
        root: identifies this output folder among those that deliver to the same server.
        selected: trials, their folders and the ids of their runs.
        analysis: the analysis settings, which determine a trial's final values.

    Returns:
        The model id of each arm.
    """
    from mlflow.entities import Metric

    stored = [model for model in _models(client, experiment) if model.tags.get("vitlab.root") == root]
    model_ids: dict[str, str] = {}
    for item, folder, run in selected:
        result = folder.result()
        if result is None or result.status != Ending.DONE or not folder.has_weights():
            continue
        arm, trial = item.planned.arm, item.planned.trial
        tags = {"arm": arm, "seed": str(item.planned.seed), "vitlab.root": root, "vitlab.trial": trial.key}
        tags |= {"vitlab.code": trial.code, "vitlab.weights": result.outcome.weights}
        model = None
        for old in (model for model in stored if model.tags.get("arm") == arm):
            if not tags.items() <= old.tags.items():  # of an earlier training of the trial, or of another seed
                client.set_logged_model_tags(old.model_id, {KIND: SUPERSEDED})
            elif model is not None:  # left by a lost response
                client.delete_logged_model(old.model_id)
            else:
                model = old
        if model is None:
            name = f"{NAME.sub('_', arm)[:200]} s{item.planned.seed}"
            model = client.create_logged_model(
                experiment, name, run, {**tags, KIND: MODEL}, dict(item.params), model_type="vitlab"
            )
        if model.tags.get(KIND) != MODEL:
            client.set_logged_model_tags(model.model_id, {KIND: MODEL})
        if str(model.status) != READY:
            _fill(client, model.model_id, item, folder, run, result.outcome.steps)
            points = records.final_points(result, analysis)
            values = [Metric(point.name, point.value, point.t, point.step, model_id=model.model_id) for point in points]
            client.log_batch(run, values)
            client.finalize_logged_model(model.model_id, READY)
        model_ids[arm] = model.model_id
    return model_ids


def _models(client: MlflowClient, experiment: str) -> Iterator[LoggedModel]:
    """Yield all models of an experiment."""
    token = None
    while True:
        page = client.search_logged_models([experiment], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _fill(client: MlflowClient, model: str, item: TrackedTrial, folder: TrialFolder, run: str, steps: int) -> None:
    """Store the files of a model, and link the run to it."""
    from mlflow.entities import LoggedModelOutput

    with tempfile.TemporaryDirectory() as place:
        for file in (folder.spec, folder.weights):
            shutil.copy(file, place)
        (Path(place) / "README.md").write_text(README.format(name=item.name, model=model), encoding="utf-8")
        client.log_model_artifacts(model, place)
    outputs = client.get_run(run).outputs
    if model not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
        client.log_outputs(run, [LoggedModelOutput(model, steps)])
