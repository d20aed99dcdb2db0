"""Empty pictures; matplotlib, an extra, is imported only here."""

import io
from pathlib import Path
from typing import Any

DOTS = 200  # an inch: twice those of a screen, enough for print


def empty_figure(name: str, width: float, height: float) -> Any:
    """A figure without axes.

    Args:
        name: What the picture is called where matplotlib is missing: ``plot runs/a/loss.png``.
        width: In inches.
        height: In inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{name} needs matplotlib, which is not installed: pip install "
            "'dflash-lightning[plot]'."
        ) from error

    class Picture(Figure):
        """Shows itself in a notebook, where only pyplot would teach a plain figure to."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=DOTS)
            return written.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written.

    Args:
        path: The picture to write; its ending names the format.

    Raises:
        ValueError: matplotlib is not installed, or the ending names no format.
    """
    endings = empty_figure(f"plot {path}", 1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise ValueError(
            f"plot must end in one of {', '.join(sorted(endings))}, got {path}. Use .png."
        )


def write_figure(figure: Any, path: Path) -> None:
    """Write a picture, with the folder it goes to.

    Args:
        figure: A figure of matplotlib.
        path: As for ``check_plot``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS)
