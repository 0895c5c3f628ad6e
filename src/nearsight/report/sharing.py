"""A trained model as others get it: a folder, or a repository on the Hugging Face Hub, with weights, numbers, page and
card.

A run is shared as a run folder. Its config.json says besides what timm wants to know, so that the same files have three
readers: `nearsight measure FOLDER`; timm, after `import nearsight`, by `local-dir:FOLDER` or `hf-hub:org/name`, which
`nearsight measure` takes, too; and `HubModel.from_pretrained`. They are data: nothing in them is run.
"""

import contextlib
import json
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import ModelCardData, ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from timm.models import save_for_hf
from torch import nn

from nearsight.data.loading import dataset_spec
from nearsight.errors import InputError
from nearsight.files import RUN, check_kind, output_folder, read_object, replacing, write_json, write_text
from nearsight.lens import HeadTable, patch_grid
from nearsight.models import load_model, load_source
from nearsight.models.sourced import downloading, one_line
from nearsight.models.zoo import MODELS
from nearsight.models.zoo import folder as zoo_folder
from nearsight.report.card import model_card
from nearsight.report.inputs import ModelHeads
from nearsight.report.page.document import PAGE
from nearsight.report.page.folders import Contents, read_folder
from nearsight.tensorfile import save_tensors
from nearsight.train import RunFolder, write_heads
from nearsight.train.integrity import CHECKSUMS, PROVENANCE

WEIGHTS, CARD = "model.safetensors", "README.md"
HUB = "hf-hub:"
_RESULTS = ("history.csv", "heads.csv", "heads.npz", "layers.csv", "result.json")
"""Files of a run that are shared as they are, beside its weights. Checkpoints and events are not shared."""
_MORE = (*_RESULTS, CHECKSUMS, PROVENANCE)
"""What is fetched beside the config and the weights, where it is there. The page and the card are for people."""


class HubModel(
    ModelHubMixin,
    library_name="nearsight",
    license="apache-2.0",
    pipeline_tag="image-classification",
    tags=["attention", "nearsight", "timm", "vision-transformer"],
):
    """A trained model in the form in which it is shared.

    `HubModel(run).push_to_hub("org/name")` and `.save_pretrained(folder)` write it, `HubModel.from_pretrained` reads it
    from the Hub or a folder; `.model` is the network, `.run` the run folder that it comes from.

    Args:
        source: a complete run, a name of the zoo, or a model that timm can build again from its name and settings.
        table: what was measured of a model that is not a run.
        license: of the weights, as the Hub spells it; by default that of this package.
    """

    def __init__(
        self, source: Path | str | nn.Module, *, table: HeadTable | None = None, license: str | None = None
    ) -> None:
        self.table, self.license, self._place = table, license, ""
        self.run: RunFolder | None = None
        if isinstance(source, nn.Module):
            self.model = source.eval()
            return
        self.run = RunFolder(zoo_folder(str(source)) if source in MODELS else Path(source))
        if table is not None:
            raise InputError(f"{source} is a run, which has a table of heads of its own; leave the other one out")
        self.run.read_settings()
        self.run.check_weights()
        self.run.read_provenance()  # without it a run is not complete

    @cached_property
    def model(self) -> nn.Module:
        """The network, in eval mode."""
        assert self.run is not None
        return load_model(self.run.model)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "HubModel":
        """A shared model of the Hub (`org/name`) or of a folder; only data are read, of safetensors, JSON and CSV."""
        name, load = str(pretrained_model_name_or_path), super().from_pretrained
        try:
            shared: HubModel = downloading(name, lambda: load(name, **options))
        except InputError:
            raise
        except ValueError as error:  # of JSON, and of names that are none
            raise InputError(f"{name} could not be loaded: {one_line(error)}") from error
        return shared

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "HubModel":
        if Path(model_id).is_dir():
            return cls._read(Path(model_id))
        config = hf_hub_download(model_id, RUN, **options)
        hf_hub_download(model_id, WEIGHTS, **options)
        for name in _MORE:
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(model_id, name, **options)
        return cls._read(Path(config).parent)

    @classmethod
    def _read(cls, folder: Path) -> "HubModel":
        if "schema" in read_object(folder / RUN, missing=f"{folder} is not a shared model"):
            return cls(folder)
        # Not a run, but a model of timm's; whether its config asks for too much is checked there.
        return cls(load_source(f"local-dir:{folder}").model)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> Any:
        """Write the folder; one that holds another model is refused."""
        folder = Path(save_directory)
        if self.run is not None and folder.resolve() == self.run.path.resolve():
            raise InputError(f"{folder} is the run itself; share it in another folder")
        check_kind(folder, RUN)
        if (folder / RUN).exists():
            held, own = (each and each.read_settings().get("identity") for each in (RunFolder(folder), self.run))
            if held != own:
                raise InputError(f"{folder} holds another model ({held or 'not a run'}); choose another folder")
        output_folder(folder)
        return super().save_pretrained(folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Push it to the Hub, as the user who is logged in there; the address of the commit."""
        self._place = f"{HUB}{repo_id}"
        try:
            return super().push_to_hub(repo_id, **options)
        except InputError:
            raise
        except Exception as error:  # of the network, of the Hub, and of names that it does not take
            raise InputError(
                f"{repo_id} could not be pushed: {one_line(error)}; check the name, the network and `hf auth login`"
            ) from error
        finally:
            self._place = ""

    def _save_pretrained(self, save_directory: Path) -> None:
        # Whatever can fail comes first.
        described, contents = self._timm_config(), self._contents(save_directory.name)
        if described is None and self.run is None:
            raise InputError(
                "timm cannot build this model again from its name and settings; share the run that trained it, or "
                "build it by a registered name (nearsight.create_model('locat_…') instead of add_locat)"
            )
        page = None if contents is None else self._page(contents)
        heads = None if contents is None else contents.models[0]
        name, place = save_directory.name, self._place or f"local-dir:{save_directory.name}"
        card = model_card(
            self._card_data, name, place, model=self.model, run=self.run, heads=heads, by_timm=described is not None
        )
        for name in (PROVENANCE, CHECKSUMS, PAGE, *_RESULTS):  # of an earlier time
            (save_directory / name).unlink(missing_ok=True)
        if self.run is None:
            write_json(save_directory / RUN, described)
            save_tensors(save_directory / WEIGHTS, self.model.state_dict(), {})
            if heads is not None:
                write_heads(save_directory / "heads.csv", heads.heads, 0)
        else:
            write_json(save_directory / RUN, {**self.run.read_settings(), **(described or {})})
            for name in (WEIGHTS, *_RESULTS):
                if (self.run.path / name).is_file():
                    with replacing(save_directory / name) as temporary:
                        shutil.copyfile(self.run.path / name, temporary)
        write_text(save_directory / CARD, card)
        if page is not None:
            write_text(save_directory / PAGE, page)
        if self.run is not None:
            RunFolder(save_directory).finish(self.run.read_provenance())

    def _timm_config(self) -> dict[str, Any] | None:
        """What timm's config.json says of the model; None where timm would not build the same one."""
        data_config = {}
        if self.run is not None:
            spec = dataset_spec(self.run.read_config().data.name)
            data_config = {"mean": spec.mean, "std": spec.std}
        rows, columns = getattr(getattr(self.model, "patch_embed", None), "img_size", None) or (32, 32)
        picture = torch.linspace(-1, 1, 3 * rows * columns).view(1, 3, rows, columns)
        try:
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                save_for_hf(self.model, folder, safe_serialization=True, data_config=data_config)
                described: dict[str, Any] = json.loads((Path(folder) / RUN).read_text(encoding="utf-8"))
                again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
                same = torch.equal(again(picture), self.model(picture))
        except Exception:  # of a model that timm does not know
            return None
        described["pretrained_cfg"]["license"] = self._card_data.license
        return described if same else None

    def _contents(self, label: str) -> Contents | None:
        """The measured heads, and what the page is made of; None of a model that was not measured."""
        if self.run is not None:
            return read_folder(self.run.path)
        if self.table is None:
            return None
        grid = patch_grid(self.model)
        frame = self.table.to_frame().assign(epoch=0)
        grids = None if grid is None else dict.fromkeys(range(len(self.table.layer_names)), grid)
        return Contents(kind="measured", title=label, models=(ModelHeads(label=label, heads=frame, grids=grids),))

    def _page(self, contents: Contents) -> str:
        """That of the run, which shows where its heads look, if there is one."""
        if self.run is not None and (self.run.path / PAGE).is_file():
            return (self.run.path / PAGE).read_text(encoding="utf-8")
        return contents.html()

    @property
    def _card_data(self) -> ModelCardData:
        """Tags and licence, from the head of this class."""
        of_class: Any = self._hub_mixin_info.model_card_data
        data = ModelCardData(**of_class.to_dict())
        data.license = self.license or data.license
        return data


def push_to_hub(
    run_or_model: Path | str | nn.Module,
    repo_id: str,
    *,
    table: HeadTable | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Share a run folder, or a model of timm's, on the Hugging Face Hub, with a card made from its numbers.

    Args:
        run_or_model: a complete run, a name of the zoo, or a model.
        repo_id: `org/name`; made if it is not there.
        table: of a model that is not a run: what `measure` gave, for the card and the page.
        license: of the weights, as the Hub spells it.
        private: for a new repository.
        token: of the Hub, if not that of `hf auth login`.
    """
    shared = HubModel(run_or_model, table=table, license=license)
    return str(shared.push_to_hub(repo_id, private=private, token=token, commit_message="Share a model by nearsight"))
