"""One trained model per arm as an MLflow logged model, enabled by ``models: arms`` in ``run.tracker``.

A model consists of the trial's spec and its weights as safetensors, which suffice to predict and hold no code.
``vitlab.load`` reads the folder that MLflow returns.  MLflow's PyTorch flavour is not used: it stores either a
pickle, which executes code when loaded, or a traced program of one input shape.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.spec import Analysis
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Ending, TrialResult
from vitlab.trackers import records
from vitlab.trackers.replay import TrackedTrial

READY = "READY"
KIND, MODEL, SUPERSEDED = "vitlab.kind", "model", "superseded"
NAME = re.compile(r"[/:.%\"']")  #: characters that MLflow allows in no model name


def select_trials(trials: Iterable[TrackedTrial], seed: int | None) -> list[TrackedTrial]:
    """Return each arm's trial with the given seed; by default its first trial."""
    selected: dict[str, TrackedTrial] = {}
    for item in trials:
        if item.kind == "trial" and seed in (None, item.planned.seed):
            selected.setdefault(item.planned.arm, item)
    return list(selected.values())


class Models:
    """Models of one study in one experiment.  Every method may raise MLflow's exceptions."""

    def __init__(self, client: Any, experiment: str, root: str) -> None:
        self.client = client
        self.experiment = experiment
        self.root = root

    def deliver(self, selected: Sequence[tuple[TrackedTrial, TrialFolder, str]], analysis: Analysis) -> dict[str, str]:
        """Store the trained models that MLflow does not have yet.

        Args:
            selected: trials, their folders and the ids of their runs.
            analysis: the analysis settings, which determine a trial's final values.

        Returns:
            The model id of each arm.
        """
        existing = [model for model in self._all() if model.tags.get("vitlab.root") == self.root]
        model_ids: dict[str, str] = {}
        for item, folder, run in selected:
            result = folder.result()
            if result is None or result.status != Ending.DONE or not folder.has_weights():
                continue
            tags = self._tags(item, result)
            matching = [model for model in existing if tags.items() <= model.tags.items()]
            matching.sort(key=lambda model: str(model.status) != READY)
            model = matching[0] if matching else self._create(item, run, tags | {KIND: MODEL})
            if model.tags.get(KIND) != MODEL:
                self.client.set_logged_model_tags(model.model_id, {KIND: MODEL})
            if str(model.status) != READY:
                self._store(model.model_id, folder, item)
                self._link(model.model_id, run, result, analysis)
                self.client.finalize_logged_model(model.model_id, READY)
            for surplus in matching[1:]:  # duplicates, left by a lost response to ``create``
                self.client.delete_logged_model(surplus.model_id)
            for old in existing:  # of an earlier training of the trial, or of a seed requested before
                is_old = old.tags.get("arm") == item.planned.arm and old not in matching
                if is_old and old.tags.get(KIND) != SUPERSEDED:
                    self.client.set_logged_model_tags(old.model_id, {KIND: SUPERSEDED})
            model_ids[item.planned.arm] = model.model_id
        return model_ids

    def _all(self) -> list[Any]:
        models: list[Any] = []
        token = None
        while True:
            page = self.client.search_logged_models([self.experiment], page_token=token)
            models += page
            token = page.token
            if not token:
                return models

    def _tags(self, item: TrackedTrial, result: TrialResult) -> dict[str, str]:
        trial = item.planned.trial
        tags = {"arm": item.planned.arm, "seed": str(item.planned.seed), "vitlab.root": self.root}
        return tags | {"vitlab.trial": trial.key, "vitlab.code": trial.code, "vitlab.weights": result.outcome.weights}

    def _create(self, item: TrackedTrial, run: str, tags: Mapping[str, str]) -> Any:
        name = f"{NAME.sub('_', item.planned.arm)[:200]} s{item.planned.seed}"
        return self.client.create_logged_model(
            self.experiment,
            name=name,
            source_run_id=run,
            tags=dict(tags),
            params=dict(item.params),
            model_type="vitlab",
        )

    def _store(self, model: str, folder: TrialFolder, item: TrackedTrial) -> None:
        for file in (folder.spec, folder.weights):
            self.client.log_model_artifact(model, str(file))
        with tempfile.TemporaryDirectory() as place:
            readme = Path(place) / "README.md"
            readme.write_text(
                f"# {item.name}\n\nWhere MLFLOW_TRACKING_URI names this server:\n\n"
                "```python\nimport mlflow, vitlab\n\n"
                f'folder = mlflow.artifacts.download_artifacts("models:/{model}")\n'
                "model, transform = vitlab.load(folder)\n"
                "logits = model(transform(images)).logits\n```\n",
                encoding="utf-8",
            )
            self.client.log_model_artifact(model, str(readme))

    def _link(self, model: str, run: str, result: TrialResult, analysis: Analysis) -> None:
        """Link the run to the model and log the run's final values on the model."""
        from mlflow.entities import LoggedModelOutput, Metric

        outputs = self.client.get_run(run).outputs
        if model not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
            self.client.log_outputs(run, [LoggedModelOutput(model, result.outcome.steps)])
        points = records.final_points(result, analysis)
        self.client.log_batch(
            run, metrics=[Metric(point.name, point.value, point.t, point.step, model_id=model) for point in points]
        )
