"""How `run-batch` embeds and scores beside other programs, as a table of `docs/performance.md`."""

from statistics import median

from benchmarks.measured import Figures

_ROWS = {
    "embeddings-minilm-l6-1000-sentence-transformers": "MiniLM-L6 shape, 1,000 texts, sentence-transformers",
    "embeddings-minilm-l6-10000-sentence-transformers": "MiniLM-L6 shape, 10,000 texts, sentence-transformers",
    "embeddings-minilm-l6-5000-vllm": "MiniLM-L6 shape, 5,000 texts, vLLM's CPU build",
    "embeddings-bge-base-1000-sentence-transformers": "BGE-base shape, 1,000 texts, sentence-transformers",
    "scores-minilm-l6-1500-sentence-transformers": "MiniLM-L6 cross-encoder, 1,500 pairs, CrossEncoder",
}
FILES = tuple(_ROWS)


def embeddings_table(*figures: Figures | None) -> str:
    """From the figures of `embeddings`, one for each of FILES; what was not measured is left
    out.
    """
    rows = ["| | dtype | `run-batch` | the other | | agreement |", "| --- | --- | --- | --- | --- | --- |"]
    rows += [_row(title, one) for title, one in zip(_ROWS.values(), figures, strict=True) if one]
    return "\n".join(rows) + "\n"


def median_seconds(figures: Figures) -> tuple[float, float]:
    """Return those of `run-batch` and of the other program."""
    other = figures.get("sentence-transformers") or figures["vllm"]
    return median(figures["pipeline"]["seconds"]), median(other["seconds"])


def _row(title: str, figures: Figures) -> str:
    ours, theirs = median_seconds(figures)
    cosine, difference = figures.get("least_cosine"), figures["largest_difference"]
    agreement = f"largest difference {difference:.0e}" if cosine is None else f"least cosine {cosine:.6f}"
    return f"| {title} | {figures['dtype']} | {ours:.1f} s | {theirs:.1f} s | {figures['ratio']:.2f}x | {agreement} |"
