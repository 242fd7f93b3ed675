"""`python -m rstar_ray.telemetry` prints the registry of metrics as a table in Markdown."""

from rstar_ray.telemetry.registry import METRICS, STEP_METRICS


def table() -> str:
    """A row per metric, in the order of the registry."""
    rows = [
        "| group | key in metrics.jsonl | Prometheus | kind | unit | labels | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for metric in METRICS:
        key = f"`{metric.name}`" if metric in STEP_METRICS else ""
        cells = (metric.group, key, f"`{metric.exported_name}`", metric.kind, metric.unit, ", ".join(metric.labels))
        rows.append(f"| {' | '.join(cells)} | {metric.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
