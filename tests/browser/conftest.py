"""Pages in headless Chromium. Where Playwright or Chromium is missing these tests are skipped, and say so."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nearsight.report import ModelHeads
from nearsight.study.results import StudyResults

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that is open, and what it has done wrong."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def section(self, name: str) -> Any:
        """A section with its charts drawn."""
        section = self.page.locator(f"#{name}")
        section.scroll_into_view_if_needed()
        section.locator(".drawing :is(svg, canvas)").first.wait_for()
        return section


@pytest.fixture
def visit(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    """Opens HTML as a file. In the end nothing may have been complained about or asked for, unless the test says so."""
    opened: list[tuple[Any, Visit]] = []

    def open_page(html: str, **options: Any) -> Visit:
        path = tmp_path / f"page-{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        found = Visit(page=context.new_page())
        found.page.on("console", lambda said: found.complaints.append(said.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", lambda asked: found.requests.append(asked.url))
        opened.append((context, found))
        found.page.goto(path.as_uri())
        return found

    yield open_page
    for context, found in opened:
        context.close()
        assert found.complaints == []
        assert len(found.requests) == 1, "the page itself is all that is asked for"


def made_up_heads(
    num_layers: int, num_heads: int, *, lowest: float, random: np.random.Generator, epochs: tuple[int, ...] = (3,)
) -> pd.DataFrame:
    """Heads of which no two numbers are alike."""
    frames = []
    for epoch in epochs:
        layer, head = np.divmod(np.arange(num_layers * num_heads), num_heads)
        mad = lowest + (0.45 - lowest) * random.uniform(0, 1, layer.size) + 0.05 * layer / num_layers
        numbers = {"mad": mad, "mad_std": random.uniform(0.005, 0.03, layer.size)}
        numbers |= {"entropy": 0.1 + 1.6 * mad, "entropy_std": random.uniform(0.005, 0.03, layer.size)}
        names = [f"blocks.{number}.attn" for number in layer]
        frames.append(
            pd.DataFrame(
                {"epoch": epoch, "layer": layer, "layer_name": names, "head": head, **numbers, "num_images": 64}
            )
        )
    return pd.concat(frames, ignore_index=True)


def made_up_history(num_epochs: int, random: np.random.Generator) -> pd.DataFrame:
    epoch = np.arange(1, num_epochs + 1)
    losses = {name: 2 / epoch + 0.1 * random.uniform(0, 1, num_epochs) for name in ("train_loss", "val_loss")}
    accuracy = 0.6 - 0.5 / epoch + 0.02 * random.uniform(0, 1, num_epochs)
    return pd.DataFrame({"epoch": epoch, **losses, "val_acc": accuracy, "lr": 1e-3, "seconds": 1.5})


@pytest.fixture(scope="session")
def make_heads() -> Callable[..., ModelHeads]:
    def make(label: str, *, lowest: float = 0.1, seed: int = 0, epochs: tuple[int, ...] = (3,)) -> ModelHeads:
        random = np.random.default_rng(seed)
        return ModelHeads(
            label=label,
            heads=made_up_heads(4, 3, lowest=lowest, random=random, epochs=epochs),
            history=made_up_history(max(epochs), random),
            config={"name": label},
        )

    return make


@pytest.fixture(scope="session")
def make_results() -> Callable[..., StudyResults]:
    def make(
        conditions: dict[str, dict[str, str]],
        *,
        seeds: int,
        shape: tuple[int, int] = (3, 2),
        num_epochs: int = 4,
        name: str = "made-up",
    ) -> StudyResults:
        """A study of two-level factors whose first one makes heads local; condition → level of each factor."""
        random = np.random.default_rng(0)
        runs, heads, history = [], [], []
        for condition, levels in conditions.items():
            is_local = next(iter(levels.values())) != "off"
            for seed in range(seeds):
                run = f"{len(runs):016x}"
                frame = made_up_heads(*shape, lowest=0.02 if is_local else 0.25, random=random).drop(columns="epoch")
                ends = {
                    f"{end}_{what}": getattr(frame[what], end)()
                    for what in ("mad", "entropy")
                    for end in ("min", "max")
                }
                trained = {"epochs": num_epochs, "best_epoch": num_epochs, "best_val_acc": 0.5}
                runs.append(
                    {"run": run, "condition": condition, **levels, "seed": seed, **trained, **ends}
                    | {"test_acc": random.uniform(0.4, 0.6), "position_association": np.nan}
                    | {"images_per_second": 1000.0, "wall_seconds": 10.0}
                )
                heads.append(frame.assign(run=run))
                history.append(made_up_history(num_epochs, random).assign(run=run))
        factors = {
            factor: tuple(sorted({levels[factor] for levels in conditions.values()}))
            for factor in next(iter(conditions.values()))
        }
        return StudyResults(
            name=name,
            factors=factors,
            runs=pd.DataFrame(runs),
            heads=pd.concat(heads, ignore_index=True),
            history=pd.concat(history, ignore_index=True),
            scale="full",
            settings={"data.name": name},
            assumed=(),
        )

    return make
