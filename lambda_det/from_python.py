"""Check data, train and use a run from Python: the functions of the commands, without a shell."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lambda_det.cli import named_file, training_parser
from lambda_det.detection.prediction import Predictor
from lambda_det.errors import ConfigError, DataError, WeightsError, naming_arguments
from lambda_det.files import expanded
from lambda_det.training.command_line import quoted, run
from lambda_det.training.run_folder import RunFolder

if TYPE_CHECKING:
    from PIL import Image

    from lambda_det.own_data.evaluate import ResultsOnData


class Run:
    """A run in its folder. It may still be training: the folder is read again at each call.

        run = lambda_det.Run("output/mine")
        pandas.DataFrame(run.metrics).plot("iteration", "total_loss")
        found = run.predictor()("photo.jpg")

    Attributes:
        folder: of the run.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        """
        Raises:
            DataError: it is not the folder of a run.
        """
        self._run = RunFolder(expanded(folder))
        self.folder = self._run.path
        self._run.refuse_no_config()

    def __repr__(self) -> str:
        with contextlib.suppress(WeightsError):
            return f"Run({str(self.folder)!r}), best checkpoint {Path(self.best).name}"
        return f"Run({str(self.folder)!r}), without a checkpoint"

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The log, a row for each logged step; ``pandas.DataFrame`` takes it as it is."""
        return self._run.metrics()

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """A row for each evaluation: "step", and results such as "box AP" and "mask AP50".

        The results are of the averaged weights where a recipe has them, and have the same names
        whether it does or not; ``metrics`` has both. With several data sets the name of one stands
        before, such as "mine/box AP".

        Raises:
            DataError: metrics.json is damaged.
        """
        from lambda_det.own_data.report.reading import evaluations_of

        return evaluations_of(self.metrics)

    @property
    def best(self) -> str:
        """The file of the best checkpoint at the evaluations; the last checkpoint if there was
        none.

        Raises:
            WeightsError: there is no checkpoint yet.
        """
        if not (found := self._run.choose()):
            raise WeightsError(f"{self.folder} has no checkpoint yet.")
        return found

    def predictor(self, **options: Any) -> Predictor:
        """The detector with the best weights; ``options`` are as of :class:`Predictor`."""
        return Predictor(self.folder, **options)

    @property
    def first_batch(self) -> Image.Image:
        """The first images of the training with their objects, as the network got them.

        Raises:
            DataError: the run has no such image: it has not begun, or learns no instances.
        """
        from PIL import Image

        from lambda_det.detection.first_batch import FILE

        path = self.folder / FILE
        if not path.is_file():
            raise DataError(
                f"{self.folder} has no {FILE}, which a training draws at its first step."
            )
        return Image.open(path)

    def plot_curves(self) -> Image.Image:
        """Draw the total loss and AP over the steps.

        Raises:
            DataError: nothing was logged yet.
        """
        from lambda_det.own_data.report.plots import plot_curves

        return plot_curves(self.folder)

    def plot_worst(self, number: int = 4, **options: Any) -> Image.Image:
        """Draw the worst images of the last evaluation, predictions beside the ground truth.

        Args:
            number: of images.
            options: ``dataset`` and ``score``, see
                :func:`lambda_det.own_data.report.plots.plot_worst`.

        Raises:
            UserError: the run was not evaluated, or its data were moved.
        """
        from lambda_det.own_data.report.plots import plot_worst

        return plot_worst(self.folder, number, **options)

    @naming_arguments()
    def evaluate(
        self,
        part: str | None = None,
        *,
        data: str | os.PathLike | None = None,
        labels: str | os.PathLike | None = None,
        images: str | os.PathLike | None = None,
        output: str | os.PathLike | None = None,
        **options: Any,
    ) -> ResultsOnData:
        """Evaluate the best checkpoint on a part of its data or on other data, as ``lambda-det
        evaluate`` does; ``print`` shows the results beside the run's own.

        Args:
            part: "train", "val" or "test"; None for the test part, or the only existing one.
            data: the folder of another data set.
            labels, images: labels of any format in place of ``data``, and their images.
            output: the folder for the results; None for one below "evaluations" of the run's.
            options: ``checkpoint``, ``raw`` and ``opts``, see
                :func:`lambda_det.own_data.evaluate.evaluate`.

        Raises:
            UserError: one sentence on what cannot work.
        """
        from lambda_det.own_data.evaluate import evaluate

        return evaluate(
            self.folder,
            part=part,
            data=expanded(data),
            labels=expanded(labels),
            images=expanded(images),
            output=expanded(output),
            **options,
        )

    @naming_arguments()
    def report(self, output: str | os.PathLike | None = None, **options: Any) -> Path:
        """Write the page of the run, as ``lambda-det report``, and return its file.

        Args:
            output: an .html file; None for report.html in the folder.
            options: ``dataset``, ``score`` and ``pictures``, see
                :func:`lambda_det.own_data.report.run_page.build_report`.
        """
        from lambda_det.own_data.report.run_page import write_report

        return write_report(self.folder, expanded(output), **options)

    @naming_arguments()
    def export(
        self,
        path: str | os.PathLike,
        *,
        overwrite: bool = False,
        images: Sequence[str | os.PathLike] = (),
        proof: int = 100,
        **options: Any,
    ) -> Path:
        """Write the detector as ``lambda-det export`` does, and print what was compared.

        Args:
            path: ends in .onnx.
            overwrite: replace the file if it is there.
            images: photographs to compare on, beside validation images.
            proof: number of validation images to compare the AP on; 0 for none, and then, without
                ``images``, a file is written that nobody has compared.
            options: ``checkpoint``, ``raw``, ``backbone_only``, ``batch`` and ``fixed``, see
                :func:`lambda_det.export.sources.network_to_export`.

        Raises:
            ConfigError: the file is there, cannot be made, or does not compute what the model does.
        """
        from lambda_det.export.session import export_network
        from lambda_det.export.sources import network_to_export

        network = network_to_export(self.folder, proof=proof, **options)
        path, images = expanded(path), [expanded(image) for image in images]
        report = export_network(network, path, images=images, overwrite=overwrite)
        print(report)
        if not report.passed:
            raise ConfigError(f"{path} would not compute what the model does; see above.")
        return report.path


@naming_arguments()
def check(
    labels: str | os.PathLike,
    images: str | os.PathLike | None = None,
    *,
    open_images: bool = True,
    single_class: bool = False,
) -> bool:
    """Check a data set as ``lambda-det check`` does, and print what is found.

    Args:
        labels: the folder of a data set, of which all parts are checked, or a file of labels.
        images: the folder of the images of a file.
        open_images: look for damaged images and for copies.
        single_class: check as a training with this argument, which takes all classes as one.

    Returns:
        Whether nothing is wrong.

    Raises:
        ConfigError: ``labels`` is empty.
        DataError: the data cannot be read at all.
    """
    from lambda_det.own_data import command_line

    places = [expanded(place) for place in (labels, images) if place is not None]
    flags = _words({"no_images": not open_images, "single_class": single_class})
    words = [*flags, "--", *places]
    return command_line.check(command_line.parse_arguments(words)) == 0


@naming_arguments()
def train(
    data: str | os.PathLike | None = None,
    recipe: str | os.PathLike | None = None,
    *,
    output: str | os.PathLike,
    epochs: float | None = None,
    resume: bool = False,
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Train as ``lambda-det train`` does, in this process, and return the run.

        run = lambda_det.train("my/", output="output/mine", epochs=20, batch=8)
        run = lambda_det.train("my/", output="output/mine", resume=True, **{"SEED": 1})

    An interrupt (Ctrl-C, a notebook's stop) saves a checkpoint after the step, and a second one
    stops at once; the same call with ``resume`` continues from the last checkpoint.

    Args:
        data: the folder of a data set. ``train``, ``images`` and ``test`` name its parts instead.
        recipe: a configuration file, or the name of one that lambda_det brings; None for one that
            follows from the data and the machine.
        output: the folder of the run.
        epochs: passes over the images; None for the recipe's.
        resume: continue the run in the folder; start it if there is none.
        progress: show a bar and of the log only tables, the time, evaluations and warnings.
        keys: other flags of the command, such as ``batch``, ``val_share`` and ``num_gpus``, and
            keys of the configuration with their values.

    Raises:
        UserError: one sentence on what cannot work.
        KeyboardInterrupt: after an interrupt.
    """
    flags = {"data": data, "config": recipe, "output": output, "epochs": epochs}
    flags |= {"resume": resume, "progress" if progress else "no_progress": True}
    named = {name: value for name, value in keys.items() if "." not in name and name.islower()}
    words = _words({**flags, **named})
    file = named_file(words)
    parser = training_parser(file)
    parser.refuse = _refuse  # a command line would end the process
    parser.allow_abbrev = False  # the names of arguments are whole
    args = parser.parse_args(words)
    is_lazy = not args.keys["output"].isupper()
    for key, value in keys.items():
        if key not in named:
            is_text = isinstance(value, str | os.PathLike)
            text = expanded(value) if is_text else str(value)
            text = quoted(text) if is_lazy and is_text else text
            args.opts += [f"{key}={text}"] if is_lazy else [key, text]
    run(args, file=file)
    return Run(output)


def _words(flags: dict[str, Any]) -> list[str]:
    """The words of a command line for these flags; flags that are None or False are left out."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, str | os.PathLike):
            value = expanded(value)
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def _refuse(message: str) -> None:
    raise ConfigError(f"{message}; flags and keys are those of lambda-det train.")
