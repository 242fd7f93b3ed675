"""`python -m rstar_ray.telemetry` prints the table of docs/metrics.md."""

from rstar_ray.telemetry.declared import METRICS, Metric


def table() -> str:
    """Markdown, a row per metric in the order of the declaration."""
    rows = ["| part | metric | kind | unit | labels | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, METRICS)]) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(metric.labels)
    return f"| {metric.part} | `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |"


if __name__ == "__main__":
    print(table(), end="")
