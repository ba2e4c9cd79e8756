"""Small tasks of lm-evaluation-harness with data of their own, of each kind of request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Norway": "Oslo", "Cuba": "Havana", "Kenya": "Nairobi", "Austria": "Vienna", "Greece": "Athens", "Iran": "Tehran",
}  # fmt: skip
PROSE = (
    "The sun had set behind the hills, and the village was quiet. A dog barked somewhere, once, and then no more.",
    "Water boils at one hundred degrees Celsius at sea level, and at less than that on the top of a mountain, since "
    "the air there is thinner. That is why tea tastes different when it is made high up, and why eggs need longer. "
    * 3,
    "Naïve café owners in Zürich said: «1, 2, 3!»",
)
TASKS = ("capitals", "capital_letter", "last_word", "prose", "complete")


def write_tasks(folder: Path, prose: Sequence[str] = PROSE, gen_tokens: int = 12) -> Path:
    """The folder with a YAML file of each of `TASKS`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(CAPITALS)
    questions = []
    for i, country in enumerate(names):
        others = [CAPITALS[names[(i + step) % len(names)]] for step in (0, 1, 5, 7)]
        choices = sorted(others)
        questions.append({"country": country, "choices": choices, "label": choices.index(CAPITALS[country])})
    data = {"capitals": questions, "prose": [{"text": text} for text in prose]}
    for name, rows in data.items():
        (folder / f"{name}.json").write_text("\n".join(json.dumps(row) for row in rows))

    def task(name: str, data: str, **keys: Any) -> None:
        common = {"task": name, "dataset_path": "json", "test_split": "test"}
        files: Mapping[str, Any] = {"dataset_kwargs": {"data_files": {"test": str(folder / f"{data}.json")}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **files, **keys}, sort_keys=False))

    accuracy = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    task(
        "capitals", "capitals", output_type="multiple_choice", fewshot_split="test", num_fewshot=2,
        doc_to_text="The capital of {{country}} is", doc_to_choice="{{choices}}", doc_to_target="label",
        metric_list=accuracy,
    )  # fmt: skip
    listed = "{{country}}:\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"
    task(
        "capital_letter", "capitals", output_type="multiple_choice", doc_to_text=listed,
        doc_to_choice=["A", "B", "C", "D"], doc_to_target="label", metric_list=accuracy,
    )  # fmt: skip
    task(
        "last_word", "capitals", output_type="loglikelihood", doc_to_text="The capital of {{country}} is",
        doc_to_target=" {{choices[label]}}", metric_list=[
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, accuracy[0],
        ],
    )  # fmt: skip
    of_texts = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity",
                "bits_per_byte": "bits_per_byte"}  # fmt: skip
    task(
        "prose", "prose", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": m, "aggregation": how, "higher_is_better": False} for m, how in of_texts.items()],
    )  # fmt: skip
    task(
        "complete", "capitals", output_type="generate_until", fewshot_split="test", num_fewshot=1,
        doc_to_text="The capital of {{country}} is", doc_to_target="{{choices[label]}}",
        generation_kwargs={"until": ["\n", ".", " and"], "max_gen_toks": gen_tokens, "do_sample": False},
        metric_list=[
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": ["^ "]}
        ],
    )  # fmt: skip
    return folder
