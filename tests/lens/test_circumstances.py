"""The lens sees the same whatever mode its caller is in, and whatever is compiled; and says what it cannot take."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from nearsight.errors import InputError
from nearsight.lens import attention_maps, attention_rollout, check_vit_adapter, layer_similarity, measure
from nearsight.lens.running import running, uncompiled
from nearsight.metrics import attention_distance, attention_entropy

EVERYTHING = ["shares", "quantiles", "features"]


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("compact_vit", depth=2, embed_dim=48, num_heads=4, num_classes=5, position_std=1.0)
    for block in model.blocks:  # sharp enough that a wrong number is far off
        block.attn.qkv.weight.data *= 10
    return model.eval()


def images(num: int = 8) -> Tensor:
    return torch.randn(num, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def seen(model: nn.Module, batch: Tensor) -> list[np.ndarray]:
    """What every function of the lens says."""
    table = measure(model, batch, what=EVERYTHING)
    numbers = [table.mad, table.entropy, *(table.extra[name] for name in sorted(table.extra))]
    numbers += [layer.weights_BHQK.numpy().copy() for layer in attention_maps(model, batch)]
    return [*numbers, attention_rollout(model, batch).numpy().copy(), layer_similarity(model, batch).matrix]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_inference_mode_changes_nothing() -> None:
    model, batch = vit(), images()
    expected = seen(model, batch)
    with torch.inference_mode():
        assert_same(seen(model, batch), expected)
        made_here, batch_made_here = vit(), images()
        assert batch_made_here.is_inference()
        assert_same(seen(made_here, batch_made_here), expected)
    assert_same(seen(model, batch_made_here), expected)
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_images_that_are_made_in_inference_mode_one_after_the_other() -> None:
    model, batch = vit(), images()

    def made() -> Iterator[Tensor]:
        with torch.inference_mode():
            for part in batch.split(4):
                yield part * 1

    found, expected = (measure(model, parts, what=EVERYTHING) for parts in (made(), batch.split(4)))
    np.testing.assert_array_equal(found.mad, expected.mad)
    for name, values in expected.extra.items():
        np.testing.assert_array_equal(found.extra[name], values)
    assert torch.equal(attention_rollout(model, made()), attention_rollout(model, batch))
    similar = [layer_similarity(model, parts).matrix for parts in (made(), batch.split(4))]
    np.testing.assert_array_equal(*similar)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "module.compile()": compiled_in_place,
    "a part": lambda model: nn.Sequential(torch.compile(model, backend="eager")),
    "the whole": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("how", COMPILED)
def test_compiled_models_are_seen_as_they_were_written(how: str) -> None:
    expected = seen(vit(), images())
    model = COMPILED[how](vit())
    assert_same(seen(model, images()), expected)
    with torch.no_grad():
        model(images())
    assert_same(seen(model, images()), expected)  # also when there is compiled code already
    assert eval_frame._stance.stance == "default"


def test_those_that_begin_first_may_end_first() -> None:
    """As two threads do: what was compiled is compiled code again when both have ended, and not before."""
    early, late = uncompiled(), uncompiled()
    early.__enter__()
    late.__enter__()
    early.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    late.__exit__(None, None, None)
    assert eval_frame._stance.stance == "default"


def test_within_a_region_that_the_caller_compiles() -> None:
    model, batch = vit(), images(4)
    expected = measure(model, batch).mad, attention_rollout(model, batch)
    with torch.no_grad():
        output = torch.compile(model, backend="eager")(batch)  # now there is code to be used instead of the model's

    @torch.compile(backend="eager")
    def region(batch: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
        with running(model) as run:
            again = run.model(run.brought(batch * 1))
        return measure(model, batch * 1).mad, attention_rollout(model, batch * 1), again

    mad, rollout, again = region(batch)
    np.testing.assert_array_equal(mad, expected[0])
    assert torch.equal(rollout, expected[1])
    torch.testing.assert_close(again, output)


class Weights(TorchFunctionMode):
    """The attention weights of each fused attention in float64, from the very queries and keys that the model used."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is F.scaled_dot_product_attention:
            query, key = args[0], args[1]
            assert query.dtype == torch.bfloat16
            logits = query.double() @ key.double().transpose(-2, -1) / math.sqrt(query.shape[-1])
            self.found.append(logits.softmax(-1))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


class InHalfPrecision(nn.Module):
    """A model that opens autocast in its own forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(batch)


@pytest.mark.parametrize("by_itself", [False, True])
def test_sums_are_not_in_the_half_precision_of_autocast(by_itself: bool) -> None:
    model, batch = vit(), images()
    model = InHalfPrecision(model) if by_itself else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not by_itself):
        with torch.no_grad(), Weights() as weights:
            model.eval()(batch)
        table, rolled = measure(model, batch), attention_rollout(model, batch)
        layers = attention_maps(model, batch, dtype=torch.float64)
    mad = torch.stack([attention_distance(attn, (8, 8)).mean(0) for attn in weights.found])
    entropy = torch.stack([attention_entropy(attn).mean(0) for attn in weights.found])
    np.testing.assert_allclose(table.mad, mad.numpy(), rtol=1e-6)
    np.testing.assert_allclose(table.entropy, entropy.numpy(), rtol=1e-6)
    for layer, attn in zip(layers, weights.found, strict=True):
        torch.testing.assert_close(layer.weights_BHQK[:, :, :64], attn[:, :, 1:, 1:])
    first, second = (attn.mean(1) / 2 + torch.eye(65) / 2 for attn in weights.found)
    assert rolled.dtype == torch.float32
    torch.testing.assert_close(rolled.flatten(1).double(), (second @ first)[:, 0, 1:], rtol=1e-5, atol=1e-8)


def test_the_default_device_is_for_the_model_alone() -> None:
    """Whoever sets it to a GPU has the model and the images there; what the lens makes for itself is on the host."""
    model, batch = vit(), images()
    expected = seen(model, batch)
    with torch.device("meta"):
        assert_same(seen(model, batch), expected)
        check_vit_adapter(model, 32)
        assert torch.empty(1).is_meta


def test_batches_of_any_whole_number() -> None:
    model, batch = vit(), images()
    expected = measure(model, batch, batch_size=3).mad
    np.testing.assert_array_equal(measure(model, batch, batch_size=np.int64(3)).mad, expected)  # type: ignore[arg-type]
    for look in (measure, attention_rollout, layer_similarity):
        with pytest.raises(InputError, match=r"batch_size is 4\.5, but a whole number is needed"):
            look(model, batch, batch_size=4.5)


def test_loaders_of_images_and_labels() -> None:
    model, batch = vit(), images()
    loader = DataLoader(TensorDataset(batch, torch.arange(8)), batch_size=4)
    np.testing.assert_array_equal(measure(model, loader).mad, measure(model, batch.split(4)).mad)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pictures", r"images are a tensor \[B, C, H, W\] or batches of such, not str"),
        (Path("pictures"), "not .*Path"),
        (np.zeros((2, 3, 32, 32)), r"a batch of images is a tensor \[B, C, H, W\], not ndarray"),
        ([{"text": "a horse"}], "none of text are images: name the argument that takes them"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "images are uint8, not floating point: normalise them"),
        ([(torch.zeros(2, 3, 32, 32, dtype=torch.long), torch.zeros(2))], "images are int64"),
    ],
    ids=["name", "path", "numpy", "dict", "uint8", "pair of integers"],
)
def test_what_is_no_images_is_named(given: object, said: str) -> None:
    for look in (measure, attention_rollout, layer_similarity):
        with pytest.raises(InputError, match=said):
            look(vit(), given)


def test_a_model_that_needs_more_than_images() -> None:
    class WithText(nn.Module):
        def forward(self, batch: Tensor, text: SimpleNamespace | None = None) -> Tensor:
            return batch * text.weight

    with pytest.raises(InputError, match=r"WithText fails on images of 32×32 pixels: .*that takes images alone"):
        measure(WithText(), images())


@pytest.mark.filterwarnings("ignore:.*flex_attention")
def test_attention_that_cannot_be_looked_into_is_named() -> None:
    class Flexible(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            tokens = batch.flatten(2).transpose(1, 2)[:, None, :128].repeat(1, 1, 1, 6)[..., :16]
            return flex_attention(tokens, tokens, tokens)

    with pytest.raises(InputError, match=r"Flexible uses flex_attention, which cannot .*; let it use scaled_dot"):
        measure(Flexible(), images(2))


def test_a_defect_of_the_lens_is_not_said_to_be_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("place")

    monkeypatch.setattr("nearsight.lens.running.survey", defect)
    with pytest.raises(KeyError, match="place"):
        measure(vit(), images())


def test_memory_that_does_not_suffice_is_not_said_to_be_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("4 GiB")

    monkeypatch.setattr("nearsight.lens.running.survey", too_large)
    with pytest.raises(torch.OutOfMemoryError):
        measure(vit(), images())


@pytest.mark.parametrize("model", ["vit_small_patch16_224", None, vit], ids=["name", "nothing", "function"])
def test_what_is_no_model_is_named(model: object) -> None:
    for look in (measure, attention_maps, attention_rollout, layer_similarity):
        with pytest.raises(InputError, match=r"a model is a torch\.nn\.Module, not "):
            look(model, images())


def test_a_precision_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="precision is one of float32, float64, not 'float16'"):
        measure(vit(), images(), precision="float16")


@pytest.mark.parametrize("look", [measure, attention_maps, attention_rollout, layer_similarity])
def test_a_single_nan_is_named(look: Callable[[nn.Module, Tensor], object]) -> None:
    batch = images()
    batch[5, 1, 2, 3] = torch.nan
    with pytest.raises(InputError, match=r"(the attention of|what) .* is NaN or infinite"):
        look(vit(), batch)


def test_layers_are_not_compared_on_images_that_are_alike() -> None:
    model = vit()
    with pytest.raises(InputError, match="give different images"):
        layer_similarity(model, images(1).expand(8, -1, -1, -1))

    class Blind(nn.Module):
        """Returns the same for all images, and passes these on."""

        def forward(self, tokens: Tensor) -> Tensor:
            return tokens * 0 + 1

    class HalfBlind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.layers = nn.Conv2d(3, 8, 8, 8), nn.ModuleList([Blind(), nn.Linear(8, 8)])

        def forward(self, batch: Tensor) -> Tensor:
            tokens = self.patches(batch).flatten(2).transpose(1, 2)
            return self.layers[0](tokens) + self.layers[1](tokens)

    similar = layer_similarity(HalfBlind(), images(), layers=["layers.0", "layers.1"]).matrix
    np.testing.assert_allclose(similar, [[np.nan, np.nan], [np.nan, 1.0]])


def test_a_quantised_model_is_measured() -> None:
    torch.manual_seed(0)
    model, batch = vit().eval(), images()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    table = measure(quantised, batch)
    assert table.layer_names == measure(model, batch).layer_names
    np.testing.assert_allclose(table.mad, measure(model, batch).mad, atol=0.02)


def test_an_exported_program_is_measured() -> None:
    torch.manual_seed(0)
    model, batch = vit().eval(), images()
    expected = measure(model, batch)
    any_number = ({0: torch.export.Dim("batch", min=1, max=64)},)
    for example, shapes in ((batch, any_number), (batch[:1], None)):
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        np.testing.assert_allclose(measure(program.module(), batch).mad, expected.mad, rtol=1e-5)
        with pytest.raises(InputError, match=r"an exported program is not a model that runs; give its \.module\(\)"):
            measure(program, batch)
    with pytest.raises(InputError, match="export it for one image, or with dynamic_shapes"):
        measure(torch.export.export(model, (batch[:4],)).module(), batch)


@pytest.mark.filterwarnings("ignore")  # of TorchScript, which is deprecated
def test_what_holds_no_weights_or_shows_nothing_is_named() -> None:
    model, batch = vit().eval(), images()
    with pytest.raises(InputError, match="are on the meta device, which holds none; load them first"):
        measure(vit().to("meta"), batch)
    with pytest.raises(InputError, match="TorchScript calls nothing that could be seen"):
        measure(torch.jit.trace(model, batch), batch)


def test_nested_tensors_are_named() -> None:
    class Nested(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            tokens = batch.flatten(2).transpose(1, 2)
            ends = torch.arange(0, len(batch) + 1) * tokens.shape[1]
            nested = torch.nested.nested_tensor_from_jagged(tokens.flatten(0, 1), ends).unsqueeze(1)
            return F.scaled_dot_product_attention(nested, nested, nested)

    with pytest.raises(InputError, match="Nested: nested tensors cannot be followed; give the model images"):
        measure(Nested(), torch.randn(2, 3, 8, 8))


def test_several_threads_take_turns_and_others_are_not_looked_at() -> None:
    torch.manual_seed(0)
    model, batch = vit().eval(), images()
    expected = measure(model, batch).mad
    found: list[np.ndarray] = []
    is_over = threading.Event()

    def run_beside() -> None:
        while not is_over.is_set():
            with torch.no_grad():
                model(batch)

    threads = [threading.Thread(target=lambda: found.append(measure(model, batch).mad)) for _ in range(4)]
    beside = threading.Thread(target=run_beside)
    for thread in (beside, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    beside.join()
    assert len(found) == 4
    for mad in found:
        np.testing.assert_array_equal(mad, expected)


def test_one_image_has_no_spread() -> None:
    table = measure(vit(), images()[:1])
    assert np.isnan(table.mad_std).all()
    assert np.isnan(table.entropy_std).all()
    assert np.isfinite(measure(vit(), images()[:2]).mad_std).all()
