"""A trained model per arm as MLflow's logged models, where ``run.tracker`` asks for them: ``models: arms``.

What is stored is the trial's own: its spec and its weights as safetensors, which hold everything that is needed to
predict and no code.  ``vitlab.load`` reads the folder that MLflow gives back.  MLflow's own way for PyTorch is not
taken: it stores either a pickle, which runs code when it is read, or a traced program of one input shape.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.spec import Analysis
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Result
from vitlab.trackers import records
from vitlab.trackers.tracked_trials import Shown

READY = "READY"
KIND, MODEL, SUPERSEDED = "vitlab.kind", "model", "superseded"
NAME = re.compile(r"[/:.%\"']")  #: what MLflow takes in no name of a model


def chosen(trials: Iterable[Shown], seed: int | None) -> list[Shown]:
    """Of every arm the trial with that seed; by default its first."""
    found: dict[str, Shown] = {}
    for item in trials:
        if item.kind == "trial" and seed in (None, item.planned.seed):
            found.setdefault(item.planned.arm, item)
    return list(found.values())


class Models:
    """The models of one study in one experiment.  Every method may raise whatever MLflow raises."""

    def __init__(self, client: Any, experiment: str, root: str) -> None:
        self.client = client
        self.experiment = experiment
        self.root = root

    def deliver(self, wanted: Sequence[tuple[Shown, TrialFolder, str]], analysis: Analysis) -> dict[str, str]:
        """Store the models that have been trained and are not there yet.

        Args:
            wanted: trial, folder and the id of its run.
            analysis: says which of a trial's values are its final ones.

        Returns:
            arm to the id of its model.
        """
        there = [model for model in self._all() if model.tags.get("vitlab.root") == self.root]
        found: dict[str, str] = {}
        for item, folder, run in wanted:
            result = folder.result()
            if result is None or result.status != "done" or not folder.usable():
                continue
            tags = self._tags(item, result)
            same = [model for model in there if tags.items() <= model.tags.items()]
            same.sort(key=lambda model: str(model.status) != READY)
            model = same[0] if same else self._create(item, run, tags | {KIND: MODEL})
            if model.tags.get(KIND) != MODEL:
                self.client.set_logged_model_tags(model.model_id, {KIND: MODEL})
            if str(model.status) != READY:
                self._store(model.model_id, folder, item)
                self._link(model.model_id, run, result, analysis)
                self.client.finalize_logged_model(model.model_id, READY)
            for surplus in same[1:]:  # an answer to ``create`` was lost
                self.client.delete_logged_model(surplus.model_id)
            for old in there:  # a trial trained anew, or another seed that was asked for before
                is_old = old.tags.get("arm") == item.planned.arm and old not in same
                if is_old and old.tags.get(KIND) != SUPERSEDED:
                    self.client.set_logged_model_tags(old.model_id, {KIND: SUPERSEDED})
            found[item.planned.arm] = model.model_id
        return found

    def _all(self) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self.client.search_logged_models([self.experiment], page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    def _tags(self, item: Shown, result: Result) -> dict[str, str]:
        trial = item.planned.trial
        told = {"arm": item.planned.arm, "seed": str(item.planned.seed), "vitlab.root": self.root}
        return told | {"vitlab.trial": trial.key, "vitlab.code": trial.code, "vitlab.weights": result.outcome.weights}

    def _create(self, item: Shown, run: str, tags: Mapping[str, str]) -> Any:
        name = f"{NAME.sub('_', item.planned.arm)[:200]} s{item.planned.seed}"
        return self.client.create_logged_model(
            self.experiment,
            name=name,
            source_run_id=run,
            tags=dict(tags),
            params=dict(item.params),
            model_type="vitlab",
        )

    def _store(self, model: str, folder: TrialFolder, item: Shown) -> None:
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

    def _link(self, model: str, run: str, result: Result, analysis: Analysis) -> None:
        """The run names the model, and the model the run's final values."""
        from mlflow.entities import LoggedModelOutput, Metric

        outputs = self.client.get_run(run).outputs
        if model not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
            self.client.log_outputs(run, [LoggedModelOutput(model, result.outcome.steps)])
        points = records.final_points(result, analysis)
        self.client.log_batch(
            run, metrics=[Metric(point.name, point.value, point.t, point.step, model_id=model) for point in points]
        )
